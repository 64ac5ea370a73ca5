// SPDX-License-Identifier: MIT
#include "calls.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <diffattn/attention.hpp>
#include <diffattn/forward.hpp>

namespace test {
namespace {

class serial : public any_executor {
 public:
  diffattn::index_t workers() const noexcept override { return 1; }
  void run_tasks(diffattn::index_t tasks, task_function f, void* context) override {
    for (diffattn::index_t task = 0; task < tasks; ++task) f(context, task, 0);
  }
};

template <class Args>
diffattn::status run_guarded(const Args& args) {
  constexpr std::size_t guard = 64;
  constexpr unsigned char fill = 0xff;  // all ones is a NaN
  const std::size_t bytes = diffattn::workspace_bytes(args);
  std::vector<unsigned char> memory(1 + bytes + guard, fill);
  serial executor;
  const diffattn::status s = run(args, {memory.data() + 1, bytes}, executor);
  EXPECT_EQ(memory[0], fill) << "written before the workspace";
  for (std::size_t i = 1 + bytes; i < memory.size(); ++i)
    if (memory[i] != fill) {
      ADD_FAILURE() << "written " << i - bytes << " bytes behind the workspace";
      break;
    }
  return s;
}

}  // namespace

#define DIFFATTN_TEST_CALLS(T)                                                                                         \
  diffattn::status check(const diffattn::forward_args<T>& args) {                                                      \
    return diffattn::check(args);                                                                                      \
  }                                                                                                                    \
  diffattn::status check(const diffattn::attention_args<T>& args) {                                                    \
    return diffattn::check(args);                                                                                      \
  }                                                                                                                    \
  std::size_t workspace_bytes(const diffattn::forward_args<T>& args, diffattn::index_t workers) {                      \
    return diffattn::workspace_bytes(args, workers);                                                                   \
  }                                                                                                                    \
  std::size_t workspace_bytes(const diffattn::attention_args<T>& args, diffattn::index_t workers) {                    \
    return diffattn::workspace_bytes(args, workers);                                                                   \
  }                                                                                                                    \
  diffattn::status run(const diffattn::forward_args<T>& args, diffattn::workspace scratch, any_executor& executor) {   \
    return diffattn::forward(args, scratch, executor);                                                                 \
  }                                                                                                                    \
  diffattn::status run(const diffattn::attention_args<T>& args, diffattn::workspace scratch, any_executor& executor) { \
    return diffattn::attention(args, scratch, executor);                                                               \
  }                                                                                                                    \
  diffattn::status run(const diffattn::forward_args<T>& args) {                                                        \
    return run_guarded(args);                                                                                          \
  }                                                                                                                    \
  diffattn::status run(const diffattn::attention_args<T>& args) {                                                      \
    return run_guarded(args);                                                                                          \
  }

DIFFATTN_TEST_CALLS(float)
DIFFATTN_TEST_CALLS(double)

}  // namespace test

// SPDX-License-Identifier: MIT
#include "calls.hpp"

#include "guarded.hpp"

#include <gtest/gtest.h>

#include <diffattn/attention.hpp>
#include <diffattn/forward.hpp>
#include <diffattn/merge.hpp>

namespace test {
namespace {

class serial : public any_executor {
 public:
  diffattn::index_t workers() const noexcept override { return 1; }
  void run_tasks(diffattn::index_t tasks, task_function f, void* context) override {
    for (diffattn::index_t task = 0; task < tasks; ++task) f(context, task, 0);
  }
};

template <class T>
diffattn::status call(const diffattn::forward_args<T>& args, diffattn::workspace scratch, any_executor& executor) {
  return diffattn::forward(args, scratch, executor);
}
template <class T>
diffattn::status call(const diffattn::attention_args<T>& args, diffattn::workspace scratch, any_executor& executor) {
  return diffattn::attention(args, scratch, executor);
}
template <class T>
diffattn::status call(const diffattn::merge_args<T>& args, diffattn::workspace scratch, any_executor& executor) {
  return diffattn::merge(args, scratch, executor);
}
template <class T>
diffattn::status call(const diffattn::merge_attention_args<T>& args, diffattn::workspace scratch, any_executor& executor) {
  return diffattn::merge(args, scratch, executor);
}

}  // namespace

template <class Args>
diffattn::status check(const Args& args) {
  return diffattn::check(args);
}

template <class Args>
std::size_t workspace_bytes(const Args& args, diffattn::index_t workers) {
  return diffattn::workspace_bytes(args, workers);
}
template <class Args>
std::size_t workspace_bytes(const Args& args, diffattn::index_t workers, diffattn::index_t kv_len) {
  return diffattn::workspace_bytes(args, workers, kv_len);
}

template <class Args>
diffattn::status run(const Args& args, diffattn::workspace scratch, any_executor& executor) {
  return call(args, scratch, executor);
}

template <class Args>
diffattn::status run(const Args& args) {
  constexpr std::size_t guard = 64;
  constexpr unsigned char fill = 0xff;  // all ones is a NaN
  const std::size_t bytes = diffattn::workspace_bytes(args);
  serial executor;
  if (guarded) {
    std::vector<unsigned char> exact(bytes < spare_line ? 0 : bytes - spare_line, fill);
    return call(args, {exact.data(), bytes}, executor);
  }
  std::vector<unsigned char> memory(1 + bytes + guard, fill);
  const diffattn::status s = call(args, {memory.data() + 1, bytes}, executor);
  EXPECT_EQ(memory[0], fill) << "written before the workspace";
  for (std::size_t i = 1 + bytes; i < memory.size(); ++i)
    if (memory[i] != fill) {
      ADD_FAILURE() << "written " << i - bytes << " bytes behind the workspace";
      break;
    }
  return s;
}

#define DIFFATTN_TEST_CALLS(Args)                                                          \
  template diffattn::status check(const Args&);                                            \
  template std::size_t workspace_bytes(const Args&, diffattn::index_t);                    \
  template diffattn::status run(const Args&, diffattn::workspace, any_executor& executor); \
  template diffattn::status run(const Args&);
#define DIFFATTN_TEST_CALLS_WITH_KEYS(Args) \
  DIFFATTN_TEST_CALLS(Args)                 \
  template std::size_t workspace_bytes(const Args&, diffattn::index_t, diffattn::index_t);
#define DIFFATTN_TEST_ALL_CALLS(T)                           \
  DIFFATTN_TEST_CALLS_WITH_KEYS(diffattn::forward_args<T>)   \
  DIFFATTN_TEST_CALLS_WITH_KEYS(diffattn::attention_args<T>) \
  DIFFATTN_TEST_CALLS(diffattn::merge_args<T>)               \
  DIFFATTN_TEST_CALLS(diffattn::merge_attention_args<T>)

DIFFATTN_TEST_ALL_CALLS(float)
DIFFATTN_TEST_ALL_CALLS(double)
DIFFATTN_TEST_ALL_CALLS(diffattn::f16)
DIFFATTN_TEST_ALL_CALLS(diffattn::bf16)

}  // namespace test

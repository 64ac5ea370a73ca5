// SPDX-License-Identifier: MIT
// The library under flags that it must stand: support/calls.hpp for a few types, and appending to caches. The judge
// (hostile_test.cpp) is compiled as all tests are; the object of this file is linked first, so that its copies of inline
// functions are the ones that run.

#include "calls.hpp"

#include <diffattn/attention.hpp>
#include <diffattn/forward.hpp>

#include "../support/calls.hpp"

namespace {

template <class T>
diffattn::status call(const diffattn::forward_args<T>& a, diffattn::workspace scratch) {
  return diffattn::forward(a, scratch);
}
template <class T>
diffattn::status call(const diffattn::attention_args<T>& a, diffattn::workspace scratch) {
  return diffattn::attention(a, scratch);
}

}  // namespace

template <class Args>
diffattn::status test::run(const Args& args) {
  std::vector<unsigned char> memory(diffattn::workspace_bytes(args), 0xff);  // NaN
  return call(args, {memory.data(), memory.size()});
}
template diffattn::status test::run(const diffattn::forward_args<float>&);
template diffattn::status test::run(const diffattn::forward_args<double>&);
template diffattn::status test::run(const diffattn::forward_args<diffattn::bf16>&);
template diffattn::status test::run(const diffattn::attention_args<float>&);
template diffattn::status test::run(const diffattn::attention_args<double>&);

diffattn::status hostile::append(diffattn::kv_cache& cache, const diffattn::tensor_view<float>& k,
                                 const diffattn::tensor_view<float>& v) {
  return cache.append(k, v);
}

// SPDX-License-Identifier: MIT
// Rows so far apart that offsets in elements and bytes leave 32 bits. Everything lies in reserved addresses of which only the
// rows themselves may be touched; results are those of the compact tensors, bit for bit.

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <memory>

#include "../support/elements.hpp"
#include "../support/problem.hpp"

namespace {

using diffattn::index_t;
using diffattn::status;
using test::both_schedules;
using test::problem;
using test::spec;

/// Addresses without memory behind them, but where `allow` was called.
class reservation {
 public:
  explicit reservation(index_t bytes, int protection = PROT_NONE) : bytes_(static_cast<std::size_t>(bytes)) {
    void* const at = mmap(nullptr, bytes_, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at != MAP_FAILED) data_ = static_cast<unsigned char*>(at);
  }
  ~reservation() {
    if (data_) munmap(data_, bytes_);
  }
  reservation(const reservation&) = delete;
  reservation& operator=(const reservation&) = delete;

  unsigned char* data() const { return data_; }
  void allow(const void* p, std::size_t n) const {
    const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(p), from = begin / 4096 * 4096;
    ASSERT_EQ(mprotect(reinterpret_cast<void*>(from), begin + n - from, PROT_READ | PROT_WRITE), 0);
  }

 private:
  std::size_t bytes_;
  unsigned char* data_ = nullptr;
};

/// How far the neighbours along each axis lie apart: many elements (bytes), or some rows, side by side.
struct distances {
  index_t batch, token, head;
};
constexpr index_t beyond_31 = (index_t{1} << 31) + 40, beyond_32 = (index_t{1} << 32) + 24;
constexpr distances far_apart[] = {{beyond_31, 64, 1}, {beyond_32, 64, 1}, {1, beyond_31, 64},
                                   {1, beyond_32, 64}, {1, 64, beyond_31}, {1, 64, beyond_32}};
/// The stride for a distance when a row takes `row` units.
constexpr index_t stride(index_t distance, index_t row) {
  return distance < beyond_31 ? distance * row : distance;
}

/// A tensor with strides of so many elements, a copy of a compact one.
template <class T>
class spread {
 public:
  spread(const diffattn::tensor_view<T>& from, const distances& d) : from_(from), view_(from) {
    constexpr index_t row = 16;  // elements, at least the width
    view_.batch_stride = stride(d.batch, row), view_.token_stride = stride(d.token, row);
    view_.head_stride = stride(d.head, row);
    const index_t last = (from.batch - 1) * view_.batch_stride + (from.tokens - 1) * view_.token_stride +
                         (from.heads - 1) * view_.head_stride + from.width;
    memory_ = std::make_unique<reservation>(last * static_cast<index_t>(sizeof(T)));
    view_.data = reinterpret_cast<T*>(memory_->data());
    if (view_.data) for_each_row([&](T* far, T* near) { memory_->allow(far, bytes()), std::memcpy(far, near, bytes()); });
  }
  const diffattn::tensor_view<T>& view() const { return view_; }
  bool equals_compact() const {
    bool equal = true;
    for_each_row([&](T* far, T* near) { equal = equal && std::memcmp(far, near, bytes()) == 0; });
    return equal;
  }
  void fill(T x) const {
    for_each_row([&](T* far, T*) { std::fill(far, far + view_.width, x); });
  }

 private:
  template <class F>
  void for_each_row(F&& f) const {
    for (index_t b = 0; b < view_.batch; ++b)
      for (index_t t = 0; t < view_.tokens; ++t)
        for (index_t h = 0; h < view_.heads; ++h) f(view_.at(b, t, h), from_.at(b, t, h));
  }
  std::size_t bytes() const { return static_cast<std::size_t>(view_.width) * sizeof(T); }

  diffattn::tensor_view<T> from_, view_;
  std::unique_ptr<reservation> memory_;
};

spec shape(index_t q_len) {
  spec s;
  s.batch = 2, s.q_len = q_len, s.kv_len = 40, s.d = 9, s.width = 7, s.heads = 2, s.kv = 2, s.causal = true;
  s.lambda = test::coefficient::per_token, s.norm = diffattn::norm_kind::rms;
  return s;
}

template <class T>
diffattn::token_head_view<T> per_row(const spread<T>& s) {
  return {s.view().data, s.view().batch_stride, s.view().token_stride, s.view().head_stride};
}

template <class T>
struct Far : testing::Test {};
using types = testing::Types<float, double>;
TYPED_TEST_SUITE(Far, types);

TYPED_TEST(Far, Tensors) {
  using T = TypeParam;
  for (const index_t q_len : {index_t{3}, index_t{40}})
    for (const distances& d : far_apart) {
      problem<T> p(shape(q_len));
      const spread<T> q(p.q.view(), d), k(p.k.view(), d), v(p.v.view(), d), out(p.out.view(), d), out1(p.out1.view(), d),
          lse2(p.lse2.view(), d);
      if (!lse2.view().data) GTEST_SKIP() << "no addresses";
      const spread<T> lambda(diffattn::view(p.lambdas().data(), 2, q_len, 2, 1), d);
      for (const auto schedule : both_schedules) {
        SCOPED_TRACE(testing::Message() << test::name(schedule) << ", q_len " << q_len << ", distances " << d.batch << " "
                                        << d.token << " " << d.head);
        diffattn::forward_args<T>& a = p.args();
        a.schedule = schedule;
        ASSERT_EQ(test::run(a), status::ok);
        diffattn::forward_args<T> f = a;
        f.q = q.view(), f.k = k.view(), f.v = v.view(), f.out = out.view(), f.out1 = out1.view(), f.lse2 = per_row(lse2);
        const auto l = per_row(lambda);
        f.lambda = diffattn::lambda_view<T>::strided({l.data, l.batch_stride, l.token_stride, l.head_stride});
        for (const spread<T>* o : {&out, &out1, &lse2}) o->fill(T(-3));
        const status s = test::run(f);
        ASSERT_EQ(s, status::ok) << message(s);
        for (const spread<T>* o : {&out, &out1, &lse2}) EXPECT_TRUE(o->equals_compact());
      }
    }
}

// The view of an engine with rows of its own. Strides count bytes.
TEST(FarCaches, Views) {
  for (const diffattn::storage type : test::float_storages)
    for (const index_t q_len : {index_t{3}, index_t{40}})
      for (const distances& d : far_apart) {
        problem<float> p(shape(q_len));
        diffattn::kv_cache_config config = p.cache_config({diffattn::kv_cache_kind::paged, 16});
        config.keys = config.values = type, config.sequences = 2;
        test::owned_cache cache(config);
        cache.append_in_turns({0, 1}, p.k.view(), p.v.view());
        diffattn::kv_view view = cache->view();
        std::vector<std::unique_ptr<reservation>> memory;
        const auto move = [&](diffattn::kv_rows& rows) {
          const diffattn::kv_rows from = rows;
          rows.page_stride = stride(d.batch, 64), rows.token_stride = stride(d.token, 64);
          rows.head_stride = stride(d.head, 64);
          memory.push_back(std::make_unique<reservation>(view.pages * rows.page_stride + 16 * rows.token_stride +
                                                         rows.heads * rows.head_stride));
          rows.data = memory.back()->data();
          if (!rows.data) return;
          const std::size_t bytes = static_cast<std::size_t>(row_bytes(type, rows.width));
          for (index_t page = 0; page < view.pages; ++page)
            for (index_t h = 0; h < rows.heads; ++h)
              for (index_t t = 0; t < 16; ++t) {
                unsigned char* const to = const_cast<unsigned char*>(rows.at(page, h, t));
                memory.back()->allow(to, bytes), std::memcpy(to, from.at(page, h, t), bytes);
              }
        };
        move(view.keys), move(view.values);
        if (!view.keys.data || !view.values.data) GTEST_SKIP() << "no addresses";
        for (const auto schedule : both_schedules) {
          SCOPED_TRACE(testing::Message() << test::name(type) << ", " << test::name(schedule) << ", q_len " << q_len
                                          << ", distances " << d.batch << " " << d.token << " " << d.head);
          diffattn::forward_args<float> a = p.args();
          a.schedule = schedule, a.k = a.v = {}, a.cache = cache->view();
          ASSERT_EQ(test::run(a), status::ok);
          const auto expected = p.outputs();
          a.cache = view;
          const status s = test::run(a);
          ASSERT_EQ(s, status::ok) << message(s);
          p.expect_identical(p.outputs(), expected);
        }
      }
}

// A cache whose heads and sequences are more than 4 GiB long, filled from tensors with distant rows.
TEST(FarCaches, Append) {
  for (const auto kind : {diffattn::kv_cache_kind::contiguous, diffattn::kv_cache_kind::ring, diffattn::kv_cache_kind::paged})
    for (const distances& d : far_apart) {
      const spec s = shape(40);
      problem<float> p(s);
      const spread<float> k(p.k.view(), d), v(p.v.view(), d);
      constexpr index_t many = index_t{1} << 28;
      diffattn::kv_cache_config config = p.cache_config({kind, many});
      config.capacity = many, config.sequences = 2;
      const std::size_t bytes = diffattn::kv_cache_bytes(config);
      ASSERT_GT(bytes, std::size_t{1} << 35);
      const reservation memory(static_cast<index_t>(bytes), PROT_READ | PROT_WRITE);
      if (!memory.data() || !k.view().data || !v.view().data) GTEST_SKIP() << "no addresses";
      diffattn::kv_cache cache;
      ASSERT_EQ(cache.open(config, {memory.data(), bytes}), status::ok);
      ASSERT_EQ(cache.append(k.view(), v.view()), status::ok);
      for (const auto schedule : both_schedules) {
        diffattn::forward_args<float> a = p.args();
        a.schedule = schedule;
        ASSERT_EQ(test::run(a), status::ok);
        const auto expected = p.outputs();
        a.k = a.v = {}, a.cache = cache.view();
        const status error = test::run(a);
        ASSERT_EQ(error, status::ok) << message(error);
        p.expect_identical(p.outputs(), expected);
      }
    }
}

// Token numbers beyond 32 bits: a ring of 64 tokens after 2^33 of them.
TEST(FarCaches, Positions) {
  for (const index_t before : {index_t{1} << 31, index_t{1} << 33}) {
    const spec s = shape(3);
    problem<float> p(s);
    diffattn::kv_cache_config config = p.cache_config(test::ring);
    config.capacity = 64, config.sequences = 2;
    test::owned_cache cache(config);
    cache.append_in_turns({0, 1}, p.k.view(), p.v.view());
    for (const auto schedule : both_schedules) {
      SCOPED_TRACE(testing::Message() << test::name(schedule) << " after " << before);
      diffattn::forward_args<float> a = p.args();
      a.mask.window = 30;
      a.schedule = schedule, a.k = a.v = {}, a.cache = cache->view();
      ASSERT_EQ(test::run(a), status::ok);
      const auto expected = p.outputs();
      const index_t lengths[] = {before + 40, before + 40}, begins[] = {before, before};
      a.cache.lengths = lengths, a.cache.begins = begins;
      const status error = test::run(a);
      ASSERT_EQ(error, status::ok) << message(error);
      p.expect_identical(p.outputs(), expected);
    }
  }
}

}  // namespace

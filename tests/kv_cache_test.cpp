// SPDX-License-Identifier: MIT
// The cache against a model that keeps every token in a map: thousands of random operations, rows read back by the rule that
// kv_view.hpp states, memory compared bit for bit after every error.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <diffattn/forward.hpp>
#include <diffattn/kv_cache.hpp>
#include <iterator>
#include <limits>
#include <map>
#include <new>
#include <ostream>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "support/random.hpp"

namespace diffattn {
inline namespace v0_1 {
void PrintTo(status s, std::ostream* out) {
  *out << message(s);
}
}  // namespace v0_1
}  // namespace diffattn

namespace {
int allocations = 0;
}  // namespace

#if !defined(DIFFATTN_GUARD)  // which has its own
// Not inlined: GCC 12 takes a pair of which it sees only one half for a mismatch.
DIFFATTN_NOINLINE void* operator new(std::size_t bytes) {
  ++allocations;
  if (void* const p = std::malloc(bytes == 0 ? 1 : bytes)) return p;
  throw std::bad_alloc();
}
DIFFATTN_NOINLINE void operator delete(void* p) noexcept {
  std::free(p);
}
DIFFATTN_NOINLINE void operator delete(void* p, std::size_t) noexcept {
  std::free(p);
}
#endif

namespace {

using namespace diffattn;
using bytes = std::vector<unsigned char>;

constexpr storage float_storages[] = {storage::f32, storage::f16, storage::bf16, storage::int8, storage::q6};
constexpr kv_cache_kind kinds[] = {kv_cache_kind::contiguous, kv_cache_kind::ring, kv_cache_kind::paged};

/// Memory of exactly `size` bytes, `offset` bytes behind a cache line, between bytes that nobody may change.
class guarded_memory {
 public:
  guarded_memory(std::size_t size, std::size_t offset) : all_(size + 2 * guard + 128, mark), size_(size) {
    const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(all_.data()) + guard;
    begin_ = guard + (64 - at % 64) % 64 + offset % 64;
  }
  guarded_memory(const guarded_memory&) = delete;
  guarded_memory& operator=(const guarded_memory&) = delete;

  workspace view() { return {all_.data() + begin_, size_}; }
  bytes contents() const { return all_; }
  bool guards_hold() const {
    for (std::size_t i = 0; i < all_.size(); ++i)
      if ((i < begin_ || i >= begin_ + size_) && all_[i] != mark) return false;
    return true;
  }

 private:
  static constexpr std::size_t guard = 64;
  static constexpr unsigned char mark = 0xA7;
  bytes all_;
  std::size_t size_, begin_ = 0;
};

/// An element of type T from a number of at most 8 significant bits, exactly.
template <class T>
T element(float x) {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
    return static_cast<T>(x);
  } else {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (std::is_same_v<T, bf16>) return {static_cast<std::uint16_t>(bits >> 16)};
    if (x == 0) return {};
    return {static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | ((bits >> 13 & 0x3FFFFu) - (112u << 10)))};
  }
}

/// A tensor with its memory; numbers are kept as floats besides.
template <class T>
struct tensor {
  index_t batch, tokens, heads, width;
  layout order;
  std::vector<float> numbers;
  std::vector<T> memory;

  tensor(index_t b, index_t n, index_t h, index_t w, test::random_source& random, layout l = layout::bthd)
      : batch(b), tokens(n), heads(h), width(w), order(l) {
    for (index_t i = 0; i < b * n * h * w; ++i) {
      const float x = static_cast<float>(random.integer(-127, 127)) / 32;
      numbers.push_back(x), memory.push_back(element<T>(x));
    }
  }
  tensor_view<T> view() { return diffattn::view(memory.data(), batch, tokens, heads, width, order); }
  /// The numbers of one row, in the type that the cache computes in.
  std::vector<compute_type<T>> row(index_t b, index_t t, index_t h) {
    const float* const from = numbers.data() + (view().at(b, t, h) - memory.data());
    return std::vector<compute_type<T>>(from, from + width);
  }
};

/// The bytes that a row is stored as.
template <class T>
bytes stored(storage type, const std::vector<T>& row) {
  bytes out(static_cast<std::size_t>(row_bytes(type, static_cast<index_t>(row.size()))));
  simd::encode_row<T>(
      type, static_cast<index_t>(row.size()),
      [&](index_t i, index_t n, T* block) { std::memcpy(block, row.data() + i, static_cast<std::size_t>(n) * sizeof(T)); },
      out.data());
  return out;
}

/// A row of a view, by the rule at the top of kv_view.hpp.
const unsigned char* find(const kv_view& v, const kv_rows& rows, index_t s, index_t token, index_t head) {
  const index_t page = v.table ? v.table[s * v.table_pages + token / v.page_tokens % v.table_pages] : s;
  return static_cast<const unsigned char*>(rows.data) + page * rows.page_stride + head * rows.head_stride +
         token % v.page_tokens * rows.token_stride;
}

bool holds(const kv_view& v, const kv_rows& rows, index_t s, index_t token, index_t head, const bytes& expected) {
  return std::memcmp(find(v, rows, s, token, head), expected.data(), expected.size()) == 0;
}

kv_cache_config make_config(kv_cache_kind kind, storage type, index_t sequences, index_t capacity, index_t page_tokens = 16,
                            index_t pages = 0) {
  kv_cache_config c;
  c.heads = head_map::interleaved(2, 1);
  c.key_width = 40, c.value_width = 24;
  c.keys = c.values = type;
  c.kind = kind;
  c.sequences = sequences, c.capacity = capacity, c.page_tokens = page_tokens, c.pages = pages;
  return c;
}

/// A cache that is open in memory of its own.
struct opened {
  guarded_memory memory;
  kv_cache cache;
  explicit opened(const kv_cache_config& c, std::size_t offset = 0) : memory(kv_cache_bytes(c), offset) {
    EXPECT_EQ(cache.open(c, memory.view()), status::ok);
  }
};

/// A table of rotations by arbitrary angles.
struct rope_table {
  std::vector<float> cos, sin;
  rope_view view;
  rope_table(index_t positions, index_t width, rope_style style, index_t first = 0) {
    for (index_t i = 0; i < positions * width / 2; ++i)
      cos.push_back(std::cos(static_cast<float>(i))), sin.push_back(std::sin(static_cast<float>(i)));
    view.cos = cos.data(), view.sin = sin.data(), view.positions = positions, view.width = width;
    view.style = style, view.first_position = first;
  }
};

// ---------------------------------------------------------------------------------------------- the model

struct model_token {
  std::vector<bytes> keys, values;  ///< stored rows of the heads
};

struct model_sequence {
  index_t length = 0, begin = 0;
  std::map<index_t, model_token> tokens;
  std::map<index_t, int> pages;  ///< page of the sequence -> name of the page
};

struct model {
  kv_cache_config config;
  index_t pages = 0;
  std::vector<model_sequence> sequences;
  int names = 0;

  explicit model(const kv_cache_config& c) : config(c), sequences(static_cast<std::size_t>(c.sequences)) {
    if (paged()) pages = c.pages > 0 ? c.pages : c.sequences * ((c.capacity + c.page_tokens - 1) / c.page_tokens);
  }

  bool paged() const { return config.kind == kv_cache_kind::paged; }
  bool exists(index_t s) const { return s >= 0 && s < config.sequences; }
  model_sequence& at(index_t s) { return sequences[static_cast<std::size_t>(s)]; }

  int users(int name) const {
    int n = 0;
    for (const model_sequence& s : sequences)
      for (const auto& [page, other] : s.pages) n += other == name;
    return n;
  }
  index_t free_pages() const {
    std::set<int> used;
    for (const model_sequence& s : sequences)
      for (const auto& [page, name] : s.pages) used.insert(name);
    return pages - static_cast<index_t>(used.size());
  }

  /// Forgets all tokens and pages that a sequence does not hold.
  void trim(model_sequence& s) {
    const auto held = [&](index_t first, index_t end) { return first < s.length && end > s.begin && s.length > s.begin; };
    for (auto i = s.tokens.begin(); i != s.tokens.end();) i = held(i->first, i->first + 1) ? std::next(i) : s.tokens.erase(i);
    const index_t size = config.page_tokens;
    for (auto i = s.pages.begin(); i != s.pages.end();)
      i = held(i->first * size, (i->first + 1) * size) ? std::next(i) : s.pages.erase(i);
  }

  template <class T>
  status append(const std::vector<index_t>& to, tensor<T>& k, tensor<T>& v) {
    for (std::size_t b = 0; b < to.size(); ++b) {
      if (!exists(to[b])) return status::cache_sequence;
      for (std::size_t a = 0; a < b; ++a)
        if (to[a] == to[b]) return status::cache_sequence;
    }
    const index_t n = k.tokens, size = config.page_tokens;
    for (const index_t i : to) {
      const index_t room_from = paged() ? at(i).begin - at(i).begin % size : 0;
      if (config.kind != kv_cache_kind::ring && at(i).length + n - room_from > config.capacity) return status::cache_full;
    }
    model next = *this;
    for (std::size_t b = 0; b < to.size(); ++b) {
      model_sequence& s = next.at(to[b]);
      for (index_t t = 0; t < n; ++t) {
        model_token& token = s.tokens[s.length];
        token = {};
        for (index_t h = 0; h < k.heads; ++h) token.keys.push_back(stored(config.keys, k.row(static_cast<index_t>(b), t, h)));
        for (index_t h = 0; h < v.heads; ++h)
          token.values.push_back(stored(config.values, v.row(static_cast<index_t>(b), t, h)));
        const index_t page = s.length / size;
        if (paged() && (!s.pages.count(page) || next.users(s.pages[page]) > 1)) s.pages[page] = next.names++;
        ++s.length;
      }
      if (config.kind == kv_cache_kind::ring) s.begin = std::max(s.begin, s.length - config.capacity);
      next.trim(s);
    }
    if (paged() && next.free_pages() < 0) return status::cache_no_page;
    *this = next;
    return status::ok;
  }
  status truncate(index_t i, index_t length) {
    if (!exists(i)) return status::cache_sequence;
    if (length < at(i).begin || length > at(i).length) return status::cache_length;
    at(i).length = length;
    trim(at(i));
    return status::ok;
  }
  status discard(index_t i, index_t before) {
    if (!exists(i)) return status::cache_sequence;
    if (before > at(i).length) return status::cache_length;
    at(i).begin = std::max(at(i).begin, before);
    trim(at(i));
    return status::ok;
  }
  status reset(index_t i) {
    if (!exists(i)) return status::cache_sequence;
    at(i) = {};
    return status::ok;
  }
  status fork(index_t from, index_t to) {
    if (!paged()) return status::cache_fork;
    if (!exists(from) || !exists(to) || from == to) return status::cache_sequence;
    at(to) = at(from);
    return status::ok;
  }
};

/// Pages, counts and table of a view agree with each other.
void expect_consistent_pages(const kv_cache& cache) {
  const kv_view v = cache.view();
  std::vector<int> uses(static_cast<std::size_t>(v.pages));
  for (index_t s = 0; s < v.sequences; ++s) {
    index_t used = 0;
    for (index_t i = 0; i < v.table_pages; ++i) {
      const std::int32_t page = v.table[s * v.table_pages + i];
      ASSERT_GE(page, -1);
      ASSERT_LT(page, v.pages);
      if (page >= 0) ++uses[static_cast<std::size_t>(page)], ++used;
    }
    const index_t held =
        cache.length(s) > cache.begin(s) ? (cache.length(s) - 1) / v.page_tokens - cache.begin(s) / v.page_tokens + 1 : 0;
    ASSERT_EQ(used, held) << "an entry that is not in use must be -1";
  }
  index_t unused = 0;
  for (index_t p = 0; p < v.pages; ++p) {
    ASSERT_EQ(v.references[p], uses[static_cast<std::size_t>(p)]) << "page " << p;
    unused += v.references[p] == 0;
  }
  ASSERT_EQ(cache.free_pages(), unused);
}

void expect_same(const kv_cache& cache, model& m) {
  const kv_view v = cache.view();
  for (index_t s = 0; s < m.config.sequences; ++s) {
    const model_sequence& expected = m.at(s);
    ASSERT_EQ(cache.length(s), expected.length);
    ASSERT_EQ(cache.begin(s), expected.begin);
    ASSERT_EQ(v.length(s), expected.length);
    ASSERT_EQ(v.begin(s), expected.begin);
    ASSERT_EQ(static_cast<index_t>(expected.tokens.size()), expected.length - expected.begin);
    for (const auto& [t, token] : expected.tokens) {
      for (index_t h = 0; h < v.keys.heads; ++h)
        ASSERT_TRUE(holds(v, v.keys, s, t, h, token.keys[static_cast<std::size_t>(h)])) << "key " << t << " of " << s;
      for (index_t h = 0; h < v.values.heads; ++h)
        ASSERT_TRUE(holds(v, v.values, s, t, h, token.values[static_cast<std::size_t>(h)])) << "value " << t << " of " << s;
    }
  }
  ASSERT_EQ(cache.free_pages(), m.free_pages());
  if (m.paged()) expect_consistent_pages(cache);
}

template <class T>
status random_append(kv_cache& cache, model& m, index_t n, test::random_source& random) {
  const kv_cache_config& c = m.config;
  std::vector<index_t> to;
  to.reserve(1);  // null would mean all sequences
  const bool all = random.integer(0, 3) == 0;
  if (all)
    for (index_t s = 0; s < c.sequences; ++s) to.push_back(s);
  else
    for (index_t s = 0; s < c.sequences; ++s)
      if (random.coin()) to.insert(random.coin() ? to.begin() : to.end(), s);
  if (!all && random.integer(0, 15) == 0) to.push_back(random.integer(-1, c.sequences));  // often twice or not there
  const kv_view view = cache.view();
  const index_t batch = static_cast<index_t>(to.size());
  tensor<T> k(batch, n, view.keys.heads, c.key_width, random, random.pick({layout::bthd, layout::bhtd}));
  tensor<T> v(batch, n, view.values.heads, c.value_width, random, random.pick({layout::bthd, layout::bhtd}));
  const status expected = m.append(to, k, v);
  const status got = batch == 1 && random.coin() ? cache.append(to[0], k.view(), v.view())
                                                 : cache.append(k.view(), v.view(), all ? nullptr : to.data());
  EXPECT_EQ(got, expected);
  return got;
}

void random_operations(const kv_cache_config& c, int operations, std::uint64_t seed) {
  test::random_source random(seed);
  opened o(c, static_cast<std::size_t>(random.integer(0, 63)));
  kv_cache cache = o.cache;
  model m(c);
  std::map<status, int> seen;
  for (int i = 0; i < operations; ++i) {
    const bytes before = o.memory.contents();
    const index_t s = random.integer(0, 30) == 0 ? random.pick<index_t>({-1, c.sequences}) : random.integer(0, c.sequences - 1);
    const index_t length = cache.length(s), begin = cache.begin(s);
    const index_t choice = random.integer(0, 99);
    const bool wild = random.integer(0, 9) == 0;
    status got = status::ok, expected = status::ok;
    if (choice < 55) {
      const index_t n = random.pick<index_t>({0, 1, 1, 1, 2, 3, random.integer(1, 2 * c.capacity + 2)});
      const index_t type = random.integer(0, 2);
      got = expected = c.keys == storage::f64 ? random_append<double>(cache, m, n, random)
                       : type == 0            ? random_append<float>(cache, m, n, random)
                       : type == 1            ? random_append<f16>(cache, m, n, random)
                                              : random_append<bf16>(cache, m, n, random);
    } else if (choice < 70) {
      const index_t to = wild ? random.integer(-2, length + 2) : random.integer(begin, length);
      got = cache.truncate(s, to), expected = m.truncate(s, to);
    } else if (choice < 82) {
      const index_t to = wild ? random.integer(-2, length + 2) : random.integer(begin, begin + (length - begin + 1) / 2);
      got = cache.discard(s, to), expected = m.discard(s, to);
    } else if (choice < 94) {
      const index_t to = random.integer(wild ? -1 : 0, c.sequences - (wild ? 0 : 1));
      got = cache.fork(s, to), expected = m.fork(s, to);
    } else if (choice < 99) {
      got = cache.reset(s), expected = m.reset(s);
    } else {
      got = cache.reset();
      for (index_t each = 0; each < c.sequences; ++each) m.reset(each);
    }
    ++seen[got];
    ASSERT_EQ(got, expected) << "operation " << i;
    if (got != status::ok) {
      ASSERT_EQ(o.memory.contents(), before) << "operation " << i << ": " << message(got);
    }
    ASSERT_TRUE(o.memory.guards_hold()) << "operation " << i;
    expect_same(cache, m);
    if (testing::Test::HasFatalFailure()) FAIL() << "operation " << i;
  }
  EXPECT_GT(seen[status::ok], operations / 3);
  EXPECT_GT(seen[status::cache_sequence], 0);
  EXPECT_GT(seen[status::cache_length], 0);
  if (c.kind != kv_cache_kind::ring) {
    EXPECT_GT(seen[status::cache_full], 0);
  }
  if (c.kind == kv_cache_kind::paged && c.pages > 0) {
    EXPECT_GT(seen[status::cache_no_page], 0);
  }
}

TEST(KvCacheModel, Contiguous) {
  random_operations(make_config(kv_cache_kind::contiguous, storage::f32, 3, 17), 2000, 1);
  random_operations(make_config(kv_cache_kind::contiguous, storage::int8, 1, 40), 1000, 2);
  random_operations(make_config(kv_cache_kind::contiguous, storage::f64, 4, 1), 1000, 3);
}

TEST(KvCacheModel, Ring) {
  random_operations(make_config(kv_cache_kind::ring, storage::bf16, 3, 17), 2000, 11);
  random_operations(make_config(kv_cache_kind::ring, storage::q6, 2, 8), 1000, 12);
  random_operations(make_config(kv_cache_kind::ring, storage::f64, 2, 1), 1000, 13);
}

TEST(KvCacheModel, Paged) {
  std::uint64_t seed = 21;
  for (const index_t page_tokens : {1, 3, 16, 64})
    for (const index_t scarce : {0, 1}) {
      const storage type = float_storages[seed % 5];
      const index_t capacity = page_tokens == 64 ? 150 : page_tokens == 16 ? 50 : 20;
      const index_t all = 4 * ((capacity + page_tokens - 1) / page_tokens);
      SCOPED_TRACE("pages of " + std::to_string(page_tokens));
      random_operations(make_config(kv_cache_kind::paged, type, 4, capacity, page_tokens, scarce * all / 2), 1500, seed++);
    }
  random_operations(make_config(kv_cache_kind::paged, storage::f64, 7, 10, 4, 5), 1500, seed);
}

// ---------------------------------------------------------------------------------------------- shapes and sizes

TEST(KvCache, HeadsFollowFromTheMap) {
  const head_indices table[] = {{0, 1, 6, 1, 2, -1}, {2, 3, 0, 1, 0, -1}};
  struct row {
    head_map map;
    index_t keys, values;
  };
  const row rows[] = {{head_map::interleaved(4, 2), 4, 2},
                      {head_map::interleaved(4, 2, value_layout::adjacent), 4, 4},
                      {head_map::interleaved_repeated(4, 2), 4, 2},
                      {head_map::halves(4, 4), 4, 4},
                      {head_map::grouped(8, 4, 2), 4, 4},
                      {head_map::grouped_shared(4, 2, 2), 2, 2},
                      {head_map::shared(4, 2), 2, 2},
                      {head_map::component_major(4, 2), 4, 4},
                      {head_map::single(4, 2), 2, 2},
                      {head_map::table(table, 2), 7, 3}};
  for (const row& r : rows) {
    kv_cache_config c = make_config(kv_cache_kind::contiguous, storage::f32, 2, 5);
    c.heads = r.map;
    ASSERT_EQ(check(c), status::ok);
    opened o(c);
    const kv_view v = o.cache.view();
    EXPECT_EQ(v.keys.heads, r.keys);
    EXPECT_EQ(v.values.heads, r.values);
    EXPECT_TRUE(same_heads(v.heads, r.map));
  }
}

TEST(KvCache, ViewOfEachKind) {
  EXPECT_TRUE(kv_cache().view().is_given());  // a cache, if not one that a call accepts
  EXPECT_FALSE(kv_cache().is_open());
  for (const kv_cache_kind kind : kinds) {
    opened o(make_config(kind, storage::bf16, 3, 50));
    const kv_view v = o.cache.view();
    const bool paged = kind == kv_cache_kind::paged;
    EXPECT_TRUE(v.is_given());
    EXPECT_EQ(v.sequences, 3);
    EXPECT_EQ(v.page_tokens, paged ? 16 : 50);
    EXPECT_EQ(v.table_pages, paged ? 4 : 1);
    EXPECT_EQ(v.pages, paged ? 12 : 3);
    EXPECT_EQ(v.table != nullptr, paged);
    EXPECT_EQ(v.references != nullptr, paged);
    EXPECT_EQ(v.keys.width, 40);
    EXPECT_EQ(v.values.width, 24);
    EXPECT_EQ(v.keys.type, storage::bf16);
    EXPECT_EQ(v.keys.token_stride, 80);
    EXPECT_EQ(o.cache.free_pages(), paged ? 12 : 0);
    EXPECT_EQ(o.cache.config().capacity, 50);
    EXPECT_EQ(o.cache.length(7), 0);
    EXPECT_EQ(o.cache.begin(-1), 0);
  }
}

TEST(KvCache, HeadsOfPagesStartOnCacheLines) {
  for (const kv_cache_kind kind : kinds)
    for (std::size_t offset = 0; offset < 64; offset += 7) {
      kv_cache_config c = make_config(kind, storage::f32, 2, 33, 3);
      c.key_width = 48, c.value_width = 16;
      c.values = storage::q6;
      opened o(c, offset);
      const kv_view v = o.cache.view();
      for (const kv_rows* rows : {&v.keys, &v.values})
        for (index_t p = 0; p < v.pages; ++p)
          for (index_t h = 0; h < rows->heads; ++h) EXPECT_EQ(reinterpret_cast<std::uintptr_t>(rows->at(p, h, 0)) % 64, 0u);
      EXPECT_EQ(v.keys.token_stride % 64, 0);
    }
}

TEST(KvCache, BytesOfAToken) {
  struct row {
    storage type;
    double most;
  };
  const row rows[] = {{storage::f64, 2}, {storage::bf16, 0.5}, {storage::f16, 0.5}, {storage::int8, 0.27}, {storage::q6, 0.21}};
  for (const kv_cache_kind kind : kinds)
    for (const row& r : rows) {
      kv_cache_config c = make_config(kind, storage::f32, 4, 4096);
      c.heads = head_map::interleaved(8, 4, value_layout::adjacent);
      c.key_width = c.value_width = 64;
      const double single = static_cast<double>(kv_cache_bytes(c));
      c.keys = c.values = r.type;
      // The table, the lengths and the free pages are no part of a token.
      EXPECT_LE(static_cast<double>(kv_cache_bytes(c)) / single, r.most + 0.0005);
      EXPECT_GE(single, 4096.0 * 4 * 8 * 64 * 4 * 2);
      EXPECT_LE(single, 4096.0 * 4 * 8 * 64 * 4 * 2 * 1.001);
    }
}

TEST(KvCache, CopiesOfTheHandleAreTheSameCache) {
  static_assert(std::is_trivially_copyable_v<kv_cache>);
  test::random_source random(5);
  opened o(make_config(kv_cache_kind::paged, storage::f32, 2, 20, 4));
  kv_cache copy = o.cache;
  tensor<float> k(1, 9, 2, 40, random), v(1, 9, 1, 24, random);
  ASSERT_EQ(copy.append(1, k.view(), v.view()), status::ok);
  EXPECT_EQ(o.cache.length(1), 9);
  EXPECT_EQ(o.cache.free_pages(), 7);
}

TEST(KvCache, OpenForgetsWhatTheMemoryHeld) {
  test::random_source random(6);
  const kv_cache_config c = make_config(kv_cache_kind::paged, storage::f32, 2, 20, 4);
  opened o(c);
  tensor<float> k(2, 9, 2, 40, random), v(2, 9, 1, 24, random);
  ASSERT_EQ(o.cache.append(k.view(), v.view()), status::ok);
  ASSERT_EQ(o.cache.open(c, o.memory.view()), status::ok);
  model m(c);
  expect_same(o.cache, m);
  ASSERT_EQ(o.cache.append(k.view(), v.view()), status::ok);
}

TEST(KvCache, AttachGoesOnWithACopyOfTheMemory) {
  test::random_source random(8);
  const kv_cache_config c = make_config(kv_cache_kind::paged, storage::int8, 2, 40, 4);
  std::vector<unsigned char> memory(kv_cache_bytes(c) + 64), elsewhere(memory.size() + 64);
  const auto aligned = [](std::vector<unsigned char>& m) {
    return m.data() + (64 - reinterpret_cast<std::uintptr_t>(m.data()) % 64) % 64;
  };
  kv_cache cache, restored;
  ASSERT_EQ(cache.open(c, {aligned(memory), kv_cache_bytes(c)}), status::ok);
  tensor<float> k(2, 9, 2, 40, random), v(2, 9, 1, 24, random);
  ASSERT_EQ(cache.append(k.view(), v.view()), status::ok);
  ASSERT_EQ(cache.fork(0, 1), status::ok);
  std::memcpy(aligned(elsewhere), aligned(memory), kv_cache_bytes(c));
  ASSERT_EQ(restored.attach(c, {aligned(elsewhere), kv_cache_bytes(c)}), status::ok);
  tensor<float> k2(1, 3, 2, 40, random), v2(1, 3, 1, 24, random);
  for (kv_cache* x : {&cache, &restored}) ASSERT_EQ(x->append(0, k2.view(), v2.view()), status::ok);
  EXPECT_EQ(std::memcmp(aligned(elsewhere), aligned(memory), kv_cache_bytes(c)), 0);
}

TEST(KvCache, ViewOfAnUnopenedCacheIsRefusedAsOne) {
  diffattn::forward_args<float> a;
  const float q[8] = {};
  float out[4];
  a.q = diffattn::view<const float>(q, 1, 1, 2, 4), a.out = diffattn::view(out, 1, 1, 1, 4);
  a.heads = head_map::interleaved(1, 1), a.lambda = 0.5f;
  a.cache = kv_cache{}.view();
  EXPECT_EQ(diffattn::check(a), status::cache_shape);
}

// ---------------------------------------------------------------------------------------------- errors

TEST(KvCacheErrors, Config) {
  const kv_cache_config good = make_config(kv_cache_kind::paged, storage::f32, 2, 20);
  ASSERT_EQ(check(good), status::ok);
  const auto expect = [&](status expected, auto change) {
    kv_cache_config c = good;
    change(c);
    EXPECT_EQ(check(c), expected);
    EXPECT_EQ(kv_cache_bytes(c), 0u);
    opened o(good);
    const bytes before = o.memory.contents();
    EXPECT_EQ(o.cache.open(c, o.memory.view()), expected);
    EXPECT_EQ(o.memory.contents(), before);
    EXPECT_EQ(o.cache.config().capacity, 20);  // still open as it was
  };
  using config = kv_cache_config;
  expect(status::heads_missing, [](config& c) { c.heads = {}; });
  expect(status::heads_table_null, [](config& c) { c.heads = head_map::table(nullptr, 2); });
  expect(status::heads_missing, [](config& c) { c.heads = head_map::table(nullptr, 0); });
  expect(status::heads_kv_groups, [](config& c) { c.heads = head_map::interleaved(3, 2); });
  expect(status::heads_pair_across_kv_groups, [](config& c) { c.heads = head_map::shared(3, 2); });
  static const head_indices negative_key[] = {{0, 1, -1, 1, 0, -1}}, negative_value[] = {{0, 1, 0, 1, -1, -1}};
  static const head_indices two_layouts[] = {{0, 1, 0, 1, 0, -1}, {0, 1, 0, 1, 0, 1}};
  static const head_indices huge[] = {{0, 1, std::numeric_limits<index_t>::max(), 1, 0, -1}};
  expect(status::k_heads, [](config& c) { c.heads = head_map::table(negative_key, 1); });
  expect(status::v_heads, [](config& c) { c.heads = head_map::table(negative_value, 1); });
  expect(status::heads_value_layout, [](config& c) { c.heads = head_map::table(two_layouts, 2); });
  expect(status::k_heads, [](config& c) { c.heads = head_map::table(huge, 1); });
  static const head_indices many_keys[] = {{0, 1, index_t{1} << 24, 1, 0, -1}},
                            many_values[] = {{0, 1, 0, 1, index_t{1} << 24, -1}};
  expect(status::cache_config, [](config& c) { c.heads = head_map::table(many_keys, 1); });
  expect(status::cache_config, [](config& c) { c.heads = head_map::table(many_values, 1); });
  expect(status::cache_config, [](config& c) { c.kind = static_cast<kv_cache_kind>(7); });
  expect(status::cache_config, [](config& c) { c.pages = -1; });
  expect(status::cache_storage, [](config& c) { c.keys = storage::f64; });
  expect(status::cache_storage, [](config& c) { c.values = storage::f64; });
  expect(status::cache_storage, [](config& c) { c.keys = static_cast<storage>(17); });
  const auto member = {&config::key_width, &config::value_width, &config::sequences, &config::capacity, &config::page_tokens};
  for (index_t config::*const field : member)
    for (const index_t size : {index_t{0}, index_t{-1}, std::numeric_limits<index_t>::min()})
      expect(status::cache_config, [=](config& c) { c.*field = size; });
}

TEST(KvCacheErrors, ConfigsThatOverflow) {
  using config = kv_cache_config;
  const auto member = {&config::key_width, &config::value_width, &config::sequences,
                       &config::capacity,  &config::page_tokens, &config::pages};
  for (const kv_cache_kind kind : kinds)
    for (index_t config::*const field : member)
      for (int power = 57; power <= 63; ++power) {
        config c = make_config(kind, storage::f32, 2, 20);
        c.*field = power == 63 ? std::numeric_limits<index_t>::max() : index_t{1} << power;
        const bool ignored = kind != kv_cache_kind::paged && (field == &config::page_tokens || field == &config::pages);
        EXPECT_EQ(check(c), ignored ? status::ok : status::cache_config);
        EXPECT_EQ(kv_cache_bytes(c) == 0, !ignored);
      }
  // Every size is possible, their products are not.
  for (const kv_cache_kind kind : kinds)
    for (index_t a = 10; a <= 50; a += 5)
      for (index_t b = 10; b <= 50; b += 5) {
        config c = make_config(kind, storage::f64, index_t{1} << (a < 30 ? a : 30), index_t{1} << b, index_t{1} << (a % 20));
        c.key_width = index_t{1} << a;
        const std::size_t needed = kv_cache_bytes(c);
        EXPECT_EQ(needed == 0, check(c) == status::cache_config);
        EXPECT_LT(needed, std::size_t{1} << 57);
        if (a + b + (a < 30 ? a : 30) >= 57) {
          EXPECT_EQ(check(c), status::cache_config) << a << " " << b;
        }
      }
  config pool = make_config(kv_cache_kind::paged, storage::f32, 1, 16, 16, index_t{1} << 31);
  EXPECT_EQ(check(pool), status::cache_config);  // pages are counted in 32 bits
  pool.pages = (index_t{1} << 31) - 1;
  EXPECT_EQ(check(pool), status::ok);
}

TEST(KvCacheErrors, Memory) {
  const kv_cache_config c = make_config(kv_cache_kind::ring, storage::f32, 2, 20);
  guarded_memory memory(kv_cache_bytes(c), 3);
  kv_cache cache;
  const bytes before = memory.contents();
  EXPECT_EQ(cache.open(c, {}), status::cache_memory);
  EXPECT_EQ(cache.open(c, {nullptr, kv_cache_bytes(c)}), status::cache_memory);
  EXPECT_EQ(cache.open(c, {memory.view().data, kv_cache_bytes(c) - 1}), status::cache_memory);
  EXPECT_FALSE(cache.is_open());
  EXPECT_EQ(memory.contents(), before);
  EXPECT_EQ(cache.open(c, memory.view()), status::ok);
}

TEST(KvCacheErrors, NotOpen) {
  test::random_source random(1);
  tensor<float> k(1, 1, 2, 40, random), v(1, 1, 1, 24, random);
  kv_cache cache;
  EXPECT_EQ(cache.append(k.view(), v.view()), status::cache_not_open);
  EXPECT_EQ(cache.append(0, k.view(), v.view()), status::cache_not_open);
  EXPECT_EQ(cache.truncate(0, 0), status::cache_not_open);
  EXPECT_EQ(cache.discard(0, 0), status::cache_not_open);
  EXPECT_EQ(cache.reset(0), status::cache_not_open);
  EXPECT_EQ(cache.reset(), status::cache_not_open);
  EXPECT_EQ(cache.fork(0, 1), status::cache_not_open);
  EXPECT_EQ(cache.length(0), 0);
  EXPECT_EQ(cache.begin(0), 0);
  EXPECT_EQ(cache.free_pages(), 0);
}

TEST(KvCacheErrors, Append) {
  for (const kv_cache_kind kind : kinds) {
    test::random_source random(2);
    opened o(make_config(kind, storage::int8, 3, 20, 4, kind == kv_cache_kind::paged ? 8 : 0), 5);
    kv_cache& cache = o.cache;
    tensor<float> k(3, 2, 2, 40, random), v(3, 2, 1, 24, random);
    tensor<double> wide_k(3, 2, 2, 40, random), wide_v(3, 2, 1, 24, random);
    ASSERT_EQ(cache.append(k.view(), v.view()), status::ok);
    const bytes before = o.memory.contents();
    const auto expect = [&](status expected, auto change) {
      struct {
        tensor_view<float> k, v;
        const index_t* sequences;
        rope_view rope;
      } a{k.view(), v.view(), nullptr, {}};
      change(a);
      EXPECT_EQ(cache.append(a.k, a.v, a.sequences, a.rope), expected);
      EXPECT_EQ(o.memory.contents(), before) << message(expected);
    };
    expect(status::k_null, [](auto& a) { a.k.data = nullptr; });
    expect(status::v_null, [](auto& a) { a.v.data = nullptr; });
    expect(status::k_size, [](auto& a) { a.k.tokens = -1; });
    expect(status::v_size, [](auto& a) { a.v.token_stride = index_t{1} << 60; });
    expect(status::k_width_stride, [](auto& a) { a.k.width_stride = 2; });
    expect(status::v_width_stride, [](auto& a) { a.v.width_stride = 2; });
    expect(status::cache_key_shape, [](auto& a) { a.k.heads = 1; });
    expect(status::cache_key_shape, [](auto& a) { a.k.width = 39; });
    expect(status::cache_value_shape, [](auto& a) { a.v.heads = 2; });
    expect(status::cache_value_shape, [](auto& a) { a.v.width = 23; });
    expect(status::cache_value_shape, [](auto& a) { a.v.tokens = 1; });
    expect(status::cache_value_shape, [](auto& a) { a.v.batch = 2; });
    expect(status::cache_sequence, [](auto& a) { a.k.batch = a.v.batch = 2; });
    static const index_t twice[] = {0, 2, 0}, missing[] = {0, 1, 3}, negative[] = {-1, 1, 2}, four[] = {0, 1, 2, 1};
    for (const index_t* wrong : {twice, missing, negative}) {
      expect(status::cache_sequence, [wrong](auto& a) { a.sequences = wrong; });
    }
    expect(status::cache_sequence, [](auto& a) { a.sequences = four, a.k.batch = a.v.batch = 4, a.k.batch_stride = 0; });
    float* const inside = static_cast<float*>(o.memory.view().data);
    expect(status::cache_overlap, [inside](auto& a) { a.k.data = inside + 1; });
    expect(status::cache_overlap, [inside](auto& a) { a.v.data = inside - 3 * 2 * 24 + 1; });
    const rope_table good(4, 40, rope_style::half), short_table(3, 40, rope_style::half), late(9, 40, rope_style::half, 3);
    expect(status::rope_table, [&](auto& a) { a.rope = good.view, a.rope.sin = nullptr; });
    expect(status::rope_table, [&](auto& a) { a.rope = good.view, a.rope.width = 39; });
    expect(status::rope_width, [&](auto& a) { a.rope = good.view, a.rope.width = 42; });
    expect(status::rope_position, [&](auto& a) { a.rope = short_table.view; });
    expect(status::rope_position, [&](auto& a) { a.rope = late.view; });
    EXPECT_EQ(cache.append(wide_k.view(), wide_v.view()), status::cache_storage);
    EXPECT_EQ(cache.append(1, k.view(), v.view()), status::cache_sequence);  // batch is not 1
    EXPECT_EQ(cache.fork(0, 0), kind == kv_cache_kind::paged ? status::cache_sequence : status::cache_fork);
    EXPECT_EQ(cache.fork(0, 3), kind == kv_cache_kind::paged ? status::cache_sequence : status::cache_fork);
    EXPECT_EQ(cache.truncate(0, 3), status::cache_length);
    EXPECT_EQ(cache.truncate(0, -1), status::cache_length);
    EXPECT_EQ(cache.truncate(3, 0), status::cache_sequence);
    EXPECT_EQ(cache.discard(0, 3), status::cache_length);
    EXPECT_EQ(cache.discard(-1, 0), status::cache_sequence);
    EXPECT_EQ(cache.reset(3), status::cache_sequence);
    tensor<float> long_k(1, 19, 2, 40, random), long_v(1, 19, 1, 24, random);
    if (kind != kv_cache_kind::ring) {
      EXPECT_EQ(cache.append(1, long_k.view(), long_v.view()), status::cache_full);
    }
    EXPECT_EQ(o.memory.contents(), before);
    if (kind == kv_cache_kind::paged) {  // 8 pages of 4 tokens, 3 in use: 12 more tokens for each of 3 sequences need 9
      tensor<float> many_k(3, 12, 2, 40, random), many_v(3, 12, 1, 24, random);
      EXPECT_EQ(cache.append(many_k.view(), many_v.view()), status::cache_no_page);
    }
    EXPECT_EQ(o.memory.contents(), before);
    EXPECT_EQ(cache.append(k.view(), v.view(), nullptr, good.view), status::ok);
    EXPECT_TRUE(o.memory.guards_hold());
  }
  test::random_source random(3);
  opened o(make_config(kv_cache_kind::contiguous, storage::f64, 1, 20));
  tensor<float> k(1, 2, 2, 40, random), v(1, 2, 1, 24, random);
  EXPECT_EQ(o.cache.append(k.view(), v.view()), status::cache_storage);  // a call in double reads this cache, and only that
}

TEST(KvCacheErrors, NothingToAppendIsFine) {
  test::random_source random(4);
  for (const kv_cache_kind kind : kinds) {
    opened o(make_config(kind, storage::f32, 2, 4, 4));
    tensor<float> k(2, 3, 2, 40, random), v(2, 3, 1, 24, random);
    ASSERT_EQ(o.cache.append(k.view(), v.view()), status::ok);
    if (kind == kv_cache_kind::paged) {
      ASSERT_EQ(o.cache.fork(0, 1), status::ok);
    }
    const bytes before = o.memory.contents();
    const index_t one[] = {1};
    const tensor_view<const float> no_k = diffattn::view<const float>(nullptr, 2, 0, 2, 40);
    const tensor_view<const float> no_v = diffattn::view<const float>(nullptr, 2, 0, 1, 24);
    EXPECT_EQ(o.cache.append(no_k, no_v), status::ok);
    EXPECT_EQ(o.cache.append(diffattn::view<const float>(nullptr, 0, 5, 2, 40),
                             diffattn::view<const float>(nullptr, 0, 5, 1, 24), one),
              status::ok);
    EXPECT_EQ(o.memory.contents(), before);
  }
}

TEST(KvCacheErrors, LengthOfARingIsBounded) {
  // 2^48 tokens that are all the same take no time in a ring; their number must not overflow.
  test::random_source random(4);
  kv_cache_config c = make_config(kv_cache_kind::ring, storage::f32, 1, 2);
  c.heads = head_map::single(1, 1), c.key_width = c.value_width = 1;
  opened o(c);
  tensor<float> k(1, 1, 1, 1, random);
  tensor_view<float> x = k.view();
  x.tokens = index_t{1} << 48, x.token_stride = 0;
  status s = status::ok;
  for (int i = 0; i < 100 && s == status::ok; ++i) s = o.cache.append(0, x, x);
  EXPECT_EQ(s, status::cache_full);
  EXPECT_EQ(o.cache.length(0) - o.cache.begin(0), 2);
}

// ---------------------------------------------------------------------------------------------- what is stored

template <class T>
void expect_one_call_is_many(kv_cache_kind kind, storage type, index_t tokens, const rope_view& rope) {
  test::random_source random(static_cast<std::uint64_t>(tokens));
  kv_cache_config c = make_config(kind, type, 1, kind == kv_cache_kind::ring ? 9 : 64, 4);
  c.key_width = 44, c.value_width = 64;
  opened one(c), many(c);
  tensor<T> k(1, tokens, 2, 44, random), v(1, tokens, 1, 64, random);
  ASSERT_EQ(one.cache.append(k.view(), v.view(), nullptr, rope), status::ok);
  for (index_t t = 0; t < tokens; ++t) {
    tensor_view<T> key = k.view(), value = v.view();
    key.data = key.at(0, t, 0), value.data = value.at(0, t, 0);
    key.tokens = value.tokens = 1;
    ASSERT_EQ(many.cache.append(0, key, value, rope), status::ok);
  }
  EXPECT_EQ(one.cache.begin(0), many.cache.begin(0));
  // Same offset, so the same bytes in the same places, to the last one.
  const std::size_t size = one.memory.view().bytes;
  EXPECT_EQ(std::memcmp(one.memory.view().data, many.memory.view().data, size), 0);
}

TEST(KvCache, OneCallOrTokenByTokenGiveIdenticalBytes) {
  const rope_table rope(64, 36, rope_style::half);
  for (const kv_cache_kind kind : kinds)
    for (const index_t tokens : {1, 8, 9, 10, 18, 31})
      for (const rope_view& r : {rope_view{}, rope.view}) {
        for (const storage type : float_storages) {
          expect_one_call_is_many<float>(kind, type, tokens, r);
          expect_one_call_is_many<f16>(kind, type, tokens, r);
          expect_one_call_is_many<bf16>(kind, type, tokens, r);
        }
        expect_one_call_is_many<double>(kind, storage::f64, tokens, r);
      }
}

TEST(KvCache, RingAroundItsCapacity) {
  for (const index_t n : {6, 7, 8, 14, 15, 100}) {
    test::random_source random(static_cast<std::uint64_t>(n));
    opened o(make_config(kv_cache_kind::ring, storage::f32, 2, 7));
    tensor<float> k(1, n, 2, 40, random), v(1, n, 1, 24, random);
    ASSERT_EQ(o.cache.append(1, k.view(), v.view()), status::ok);
    EXPECT_EQ(o.cache.length(1), n);
    EXPECT_EQ(o.cache.begin(1), std::max<index_t>(0, n - 7));
    EXPECT_EQ(o.cache.length(0), 0);
    const kv_view view = o.cache.view();
    for (index_t t = o.cache.begin(1); t < n; ++t)
      for (index_t h = 0; h < 2; ++h) {
        EXPECT_TRUE(holds(view, view.keys, 1, t, h, stored(storage::f32, k.row(0, t, h))));
      }
    // Truncated after it has wrapped: the overwritten tokens stay lost.
    const index_t begin = o.cache.begin(1);
    if (begin > 0) {
      EXPECT_EQ(o.cache.truncate(1, begin - 1), status::cache_length);
    }
    ASSERT_EQ(o.cache.truncate(1, begin + 2), status::ok);
    EXPECT_EQ(o.cache.begin(1), begin);
    tensor<float> next_k(1, 3, 2, 40, random), next_v(1, 3, 1, 24, random);
    ASSERT_EQ(o.cache.append(1, next_k.view(), next_v.view()), status::ok);
    EXPECT_EQ(o.cache.begin(1), begin);
    EXPECT_TRUE(holds(view, view.keys, 1, begin + 1, 0, stored(storage::f32, k.row(0, begin + 1, 0))));
    EXPECT_TRUE(holds(view, view.keys, 1, begin + 4, 0, stored(storage::f32, next_k.row(0, 2, 0))));
  }
}

template <class T>
void expect_rotated(kv_cache_kind kind, storage type, rope_style style) {
  using real = compute_type<T>;
  test::random_source random(9);
  const rope_table rope(40, 36, style, 2);  // 4 of the 40 channels pass; rows begin with position 2
  opened o(make_config(kind, type, 3, 16));
  tensor<T> first_k(2, 3, 2, 40, random), first_v(2, 3, 1, 24, random);
  tensor<T> k(2, 12, 2, 40, random, layout::bhtd), v(2, 12, 1, 24, random);
  const index_t to[] = {2, 0};
  ASSERT_EQ(o.cache.append(first_k.view(), first_v.view(), to), status::ok);
  ASSERT_EQ(o.cache.append(k.view(), v.view(), to, rope.view), status::ok);
  const kv_view view = o.cache.view();
  for (index_t b = 0; b < 2; ++b)
    for (index_t t = 0; t < 12; ++t) {
      for (index_t h = 0; h < 2; ++h) {
        std::vector<real> row = k.row(b, t, h), turned(row.size());
        rotate(rope.view, 3 + t, row.data(), 40, turned.data());
        EXPECT_TRUE(holds(view, view.keys, to[b], 3 + t, h, stored(type, turned)));
      }
      EXPECT_TRUE(holds(view, view.values, to[b], 3 + t, 0, stored(type, v.row(b, t, 0))));
    }
}

TEST(KvCache, RotatesKeysAndNotValues) {
  for (const kv_cache_kind kind : kinds)
    for (const rope_style style : {rope_style::half, rope_style::interleaved}) {
      for (const storage type : float_storages) {
        expect_rotated<float>(kind, type, style);
        expect_rotated<f16>(kind, type, style);
        expect_rotated<bf16>(kind, type, style);
      }
      expect_rotated<double>(kind, storage::f64, style);
    }
}

TEST(KvCache, KeysAndValuesMayBeStoredDifferently) {
  test::random_source random(10);
  for (const storage keys : float_storages)
    for (const storage values : float_storages) {
      kv_cache_config c = make_config(kv_cache_kind::paged, keys, 1, 20, 4);
      c.values = values;
      opened o(c);
      tensor<float> k(1, 7, 2, 40, random), v(1, 7, 1, 24, random);
      ASSERT_EQ(o.cache.append(k.view(), v.view()), status::ok);
      const kv_view view = o.cache.view();
      for (index_t t = 0; t < 7; ++t) {
        EXPECT_TRUE(holds(view, view.keys, 0, t, 1, stored(keys, k.row(0, t, 1))));
        EXPECT_TRUE(holds(view, view.values, 0, t, 0, stored(values, v.row(0, t, 0))));
      }
    }
}

TEST(KvCache, StoredNumbersReadBackWithinTheErrorOfTheirType) {
  test::random_source random(11);
  for (const storage type : float_storages) {
    kv_cache_config c = make_config(kv_cache_kind::ring, type, 1, 20);
    c.key_width = 32;  // one block of q6, so that all scales are those of the row
    opened o(c);
    const std::vector<float> keys = test::normal_vector<float>(5 * 2 * 32, random);
    const std::vector<float> values = test::normal_vector<float>(5 * 24, random);
    ASSERT_EQ(o.cache.append(diffattn::view(keys.data(), 1, 5, 2, 32), diffattn::view(values.data(), 1, 5, 1, 24)), status::ok);
    const kv_view view = o.cache.view();
    for (index_t r = 0; r < 10; ++r) {
      float back[32];
      simd::decode_row(type, find(view, view.keys, 0, r / 2, r % 2), 32, back);
      float largest = 0;
      for (index_t i = 0; i < 32; ++i) largest = std::max(largest, std::abs(keys[static_cast<std::size_t>(r * 32 + i)]));
      for (index_t i = 0; i < 32; ++i) {
        const float x = keys[static_cast<std::size_t>(r * 32 + i)];
        const float error = type == storage::f32    ? 0
                            : type == storage::f16  ? std::abs(x) * 0x1p-11f + 0x1p-25f
                            : type == storage::bf16 ? std::abs(x) * 0x1p-8f
                            : type == storage::int8 ? largest / 253.9f
                                                    : largest / 61.5f;
        EXPECT_LE(std::abs(back[i] - x), error);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------- pages

/// Appends n random tokens to one sequence.
status grow(kv_cache& cache, index_t s, index_t n, test::random_source& random) {
  tensor<float> k(1, n, 2, 40, random), v(1, n, 1, 24, random);
  return cache.append(s, k.view(), v.view());
}

bytes rows_of(const kv_cache& cache, index_t s) {
  bytes all;
  const kv_view v = cache.view();
  for (index_t t = cache.begin(s); t < cache.length(s); ++t)
    for (const kv_rows* rows : {&v.keys, &v.values})
      for (index_t h = 0; h < rows->heads; ++h) {
        const unsigned char* const row = find(v, *rows, s, t, h);
        all.insert(all.end(), row, row + row_bytes(rows->type, rows->width));
      }
  return all;
}

TEST(KvCachePages, AForkAndItsOriginDoNotDisturbEachOther) {
  test::random_source random(12);
  opened o(make_config(kv_cache_kind::paged, storage::f32, 3, 40, 4, 12));
  kv_cache& cache = o.cache;
  ASSERT_EQ(grow(cache, 0, 10, random), status::ok);
  ASSERT_EQ(grow(cache, 1, 5, random), status::ok);  // to be replaced by the fork
  EXPECT_EQ(cache.free_pages(), 7);
  const bytes prefix = rows_of(cache, 0);
  ASSERT_EQ(cache.fork(0, 1), status::ok);
  ASSERT_EQ(cache.fork(1, 2), status::ok);
  EXPECT_EQ(cache.free_pages(), 9);
  EXPECT_EQ(rows_of(cache, 1), prefix);
  for (const index_t writer : {1, 0, 2}) {  // the last one has the page for itself again
    const bytes before[] = {rows_of(cache, 0), rows_of(cache, 1), rows_of(cache, 2)};
    ASSERT_EQ(grow(cache, writer, 1, random), status::ok);
    for (index_t s = 0; s < 3; ++s) {
      const bytes now = rows_of(cache, s), &old = before[s];
      EXPECT_TRUE(std::equal(old.begin(), old.end(), now.begin())) << s;
      EXPECT_EQ(now.size() > old.size(), s == writer);
    }
    expect_consistent_pages(cache);
  }
  EXPECT_EQ(cache.free_pages(), 7);
  ASSERT_EQ(cache.reset(0), status::ok);  // its full pages live on in the others
  EXPECT_EQ(cache.free_pages(), 8);
  const bytes rest = rows_of(cache, 1);
  EXPECT_TRUE(std::equal(prefix.begin(), prefix.end(), rest.begin()));
}

TEST(KvCachePages, TruncatedForkCopiesThePageItCutsInto) {
  test::random_source random(13);
  opened o(make_config(kv_cache_kind::paged, storage::bf16, 2, 40, 4));
  ASSERT_EQ(grow(o.cache, 0, 12, random), status::ok);
  const bytes before = rows_of(o.cache, 0);
  ASSERT_EQ(o.cache.fork(0, 1), status::ok);
  ASSERT_EQ(o.cache.truncate(1, 6), status::ok);
  ASSERT_EQ(grow(o.cache, 1, 3, random), status::ok);
  EXPECT_EQ(rows_of(o.cache, 0), before);
  expect_consistent_pages(o.cache);
}

TEST(KvCachePages, CopiesCountAgainstThePool) {
  // Two sequences share one page of a pool of two. Both may append at once: the last of them keeps the page.
  test::random_source random(14);
  opened o(make_config(kv_cache_kind::paged, storage::f32, 3, 4, 4, 2));
  kv_cache& cache = o.cache;
  ASSERT_EQ(grow(cache, 0, 1, random), status::ok);
  ASSERT_EQ(cache.fork(0, 1), status::ok);
  ASSERT_EQ(cache.fork(0, 2), status::ok);
  tensor<float> k(3, 1, 2, 40, random), v(3, 1, 1, 24, random);
  const bytes before = o.memory.contents();
  EXPECT_EQ(cache.append(k.view(), v.view()), status::cache_no_page);
  EXPECT_EQ(o.memory.contents(), before);
  ASSERT_EQ(cache.reset(1), status::ok);
  tensor<float> k2(2, 1, 2, 40, random), v2(2, 1, 1, 24, random);
  const index_t to[] = {2, 0};
  EXPECT_EQ(cache.append(k2.view(), v2.view(), to), status::ok);
  EXPECT_EQ(cache.free_pages(), 0);
  expect_consistent_pages(cache);
}

TEST(KvCachePages, FreedPagesAreTakenAgainTheLastOneFirst) {
  test::random_source random(15);
  opened o(make_config(kv_cache_kind::paged, storage::f32, 2, 16, 4, 4));
  kv_cache& cache = o.cache;
  const std::int32_t* const table = cache.view().table;
  const auto expect_table = [&](std::array<std::int32_t, 8> expected) {
    for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(table[i], expected[i]) << "entry " << i;
  };
  ASSERT_EQ(grow(cache, 0, 7, random), status::ok);
  ASSERT_EQ(grow(cache, 1, 8, random), status::ok);
  expect_table({0, 1, -1, -1, 2, 3, -1, -1});
  EXPECT_EQ(grow(cache, 0, 2, random), status::cache_no_page);
  ASSERT_EQ(cache.reset(0), status::ok);
  expect_table({-1, -1, -1, -1, 2, 3, -1, -1});
  ASSERT_EQ(cache.truncate(1, 4), status::ok);
  ASSERT_EQ(grow(cache, 0, 9, random), status::ok);
  expect_table({3, 0, 1, -1, 2, -1, -1, -1});
}

TEST(KvCachePages, AWindowMovesOnForEver) {
  test::random_source random(16);
  const kv_cache_config c = make_config(kv_cache_kind::paged, storage::f32, 1, 12, 4);
  opened o(c);
  kv_cache& cache = o.cache;
  model m(c);
  for (int i = 0; i < 50; ++i) {
    tensor<float> k(1, 1, 2, 40, random), v(1, 1, 1, 24, random);
    ASSERT_EQ(cache.append(k.view(), v.view()), status::ok);
    ASSERT_EQ(m.append({0}, k, v), status::ok);
    ASSERT_EQ(cache.discard(0, cache.length(0) - 8), status::ok);  // nothing is held before a negative position
    m.discard(0, cache.length(0) - 8);
    expect_same(cache, m);
  }
  EXPECT_EQ(cache.begin(0), 42);
  ASSERT_EQ(cache.discard(0, 50), status::ok);
  EXPECT_EQ(cache.free_pages(), 3);
  EXPECT_EQ(cache.length(0), 50);
}

// ---------------------------------------------------------------------------------------------- memory

/// One of everything.
void use(kv_cache& cache, tensor_view<const float> k, tensor_view<const float> v, const rope_view& rope) {
  const index_t to[] = {1, 0};
  EXPECT_EQ(cache.append(k, v, to, rope), status::ok);
  EXPECT_EQ(cache.append(k, v), status::ok);
  const status forked = cache.fork(0, 1);
  EXPECT_EQ(forked, cache.config().kind == kv_cache_kind::paged ? status::ok : status::cache_fork);
  EXPECT_EQ(cache.append(k, v), status::ok);
  EXPECT_EQ(cache.truncate(1, cache.length(1) - 2), status::ok);
  EXPECT_EQ(cache.discard(0, cache.begin(0) + 2), status::ok);
  EXPECT_EQ(cache.reset(0), status::ok);
  EXPECT_EQ(cache.reset(), status::ok);
}

TEST(KvCacheMemory, ExactlyTheBytesThatWereAskedFor) {
  test::random_source random(17);
  tensor<float> k(2, 5, 2, 40, random), v(2, 5, 1, 24, random);
  const rope_table rope(64, 40, rope_style::interleaved);
  for (const kv_cache_kind kind : kinds)
    for (const storage type : float_storages)
      for (std::size_t offset = 0; offset < 64; offset += 21) {
        const kv_cache_config c = make_config(kind, type, 2, 15, 3);
        bytes memory(kv_cache_bytes(c) + offset);  // its end is the end of the block, for the sanitizers
        kv_cache cache;
        ASSERT_EQ(cache.open(c, {memory.data() + offset, memory.size() - offset}), status::ok);
        use(cache, k.view(), v.view(), rope.view);
      }
}

TEST(KvCacheMemory, NothingIsAllocated) {
  test::random_source random(18);
  tensor<float> k(2, 5, 2, 40, random), v(2, 5, 1, 24, random);
  const rope_table rope(64, 40, rope_style::half);
  for (const kv_cache_kind kind : kinds) {
    const kv_cache_config c = make_config(kind, storage::q6, 2, 15, 3);
    bytes memory(kv_cache_bytes(c));
    const int before = allocations;
    kv_cache cache;
    EXPECT_EQ(cache.open(c, {memory.data(), memory.size()}), status::ok);
    use(cache, k.view(), v.view(), rope.view);
    EXPECT_EQ(cache.append(7, k.view(), v.view()), status::cache_sequence);
    EXPECT_EQ(allocations, before);
  }
}

}  // namespace

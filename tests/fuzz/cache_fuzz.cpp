// SPDX-License-Identifier: MIT
// Bytes as operations on a cache of any kind and storage, against a model: each sequence a list of the tokens appended to it,
// each page a number. Statuses are foreseen; after an error the memory is as before, bit for bit.
// For libFuzzer (-fsanitize=fuzzer), or with replay.cpp.

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <set>

#include "../support/any_call.hpp"
#include "../support/calls.hpp"

namespace {

using diffattn::index_t;
using diffattn::kv_cache;
using diffattn::kv_cache_config;
using diffattn::kv_cache_kind;
using diffattn::status;
using diffattn::storage;
using test::choices;
using test::pieces_of;
using test::stored_row;

void demand(bool fine, const std::string& what) {
  if (fine) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  std::abort();
}

// ---------------------------------------------------------------------------------------------- the model

struct token {
  std::vector<double> keys, values;  ///< of all heads
  bool rotated = false;
};

struct sequence {
  std::vector<token> tokens;  ///< all that were appended and not truncated
  index_t begin = 0;          ///< the first one that is held
  std::map<index_t, int> pages;

  index_t length() const { return static_cast<index_t>(tokens.size()); }
};

class model {
 public:
  explicit model(const kv_cache_config& c) : config_(c), sequences_(static_cast<std::size_t>(c.sequences)) {
    if (paged()) pages_ = c.pages > 0 ? c.pages : c.sequences * ((c.capacity + c.page_tokens - 1) / c.page_tokens);
  }

  bool paged() const { return config_.kind == kv_cache_kind::paged; }
  bool has(index_t s) const { return s >= 0 && s < config_.sequences; }
  sequence& at(index_t s) { return sequences_[static_cast<std::size_t>(s)]; }

  index_t free_pages() const {
    std::set<int> used;
    for (const sequence& s : sequences_)
      for (const auto& [place, page] : s.pages) used.insert(page);
    return pages_ - static_cast<index_t>(used.size());
  }

  /// Tokens for sequence to[b] each.
  status append(const std::vector<index_t>& to, const std::vector<std::vector<token>>& tokens) {
    if (std::any_of(to.begin(), to.end(), [this](index_t s) { return !has(s); })) return status::cache_sequence;
    if (std::set<index_t>(to.begin(), to.end()).size() != to.size()) return status::cache_sequence;
    for (std::size_t b = 0; b < to.size(); ++b) {
      const index_t from = paged() ? at(to[b]).begin / config_.page_tokens * config_.page_tokens : 0;
      const index_t end = at(to[b]).length() + static_cast<index_t>(tokens[b].size());
      if (config_.kind != kv_cache_kind::ring && end - from > config_.capacity) return status::cache_full;
    }
    model next = *this;
    for (std::size_t b = 0; b < to.size(); ++b) {
      sequence& s = next.at(to[b]);
      for (const token& t : tokens[b]) {
        const index_t place = s.length() / config_.page_tokens;
        // A page of others is copied when it is written to.
        if (paged() && (s.pages.count(place) == 0 || next.users(s.pages[place]) > 1)) s.pages[place] = next.names_++;
        s.tokens.push_back(t);
      }
      if (config_.kind == kv_cache_kind::ring) s.begin = std::max(s.begin, s.length() - config_.capacity);
    }
    if (next.free_pages() < 0) return status::cache_no_page;
    *this = std::move(next);
    return status::ok;
  }
  status truncate(index_t i, index_t length) {
    if (!has(i)) return status::cache_sequence;
    if (length < at(i).begin || length > at(i).length()) return status::cache_length;
    at(i).tokens.resize(static_cast<std::size_t>(length));
    forget_pages(at(i));
    return status::ok;
  }
  status discard(index_t i, index_t before) {
    if (!has(i)) return status::cache_sequence;
    if (before > at(i).length()) return status::cache_length;
    at(i).begin = std::max(at(i).begin, before);
    forget_pages(at(i));
    return status::ok;
  }
  status reset(index_t i) {
    if (!has(i)) return status::cache_sequence;
    at(i) = {};
    return status::ok;
  }
  status fork(index_t from, index_t to) {
    if (!paged()) return status::cache_fork;
    if (!has(from) || !has(to) || from == to) return status::cache_sequence;
    at(to) = at(from);
    return status::ok;
  }

 private:
  index_t users(int page) const {
    index_t n = 0;
    for (const sequence& s : sequences_)
      for (const auto& [place, other] : s.pages) n += other == page;
    return n;
  }
  /// Keeps the pages that hold a token.
  void forget_pages(sequence& s) const {
    for (auto i = s.pages.begin(); i != s.pages.end();) {
      const index_t first = i->first * config_.page_tokens, end = first + config_.page_tokens;
      const bool held = s.begin < s.length() && first < s.length() && end > s.begin;
      i = held ? std::next(i) : s.pages.erase(i);
    }
  }

  kv_cache_config config_;
  index_t pages_ = 0;
  std::vector<sequence> sequences_;
  int names_ = 0;
};

/// Are the numbers of a stored row those of x, within the error that storage.hpp states?
bool holds(storage type, const unsigned char* row, const double* x, index_t width, double rounding) {
  for (index_t i = 0; i < width; ++i) {
    double largest = 0;
    const index_t first = type == storage::q6 ? i / 32 * 32 : 0,
                  end = type == storage::q6 ? std::min(first + 32, width) : width;
    for (index_t j = first; j < end; ++j) largest = std::max(largest, std::fabs(x[j]));
    const double size = std::fabs(x[i]);
    double error = rounding * largest;
    if (type == storage::f16) error += size * 0x1p-11 + 0x1p-25;
    if (type == storage::bf16) error += size * 0x1p-8;
    if (type == storage::int8) error += largest / 253.9;
    if (type == storage::q6) error += largest / 61.5;
    if (!(std::fabs(test::stored_number(type, row, i) - x[i]) <= error * (1 + 1e-6))) return false;
  }
  return true;
}

// ---------------------------------------------------------------------------------------------- the cache

/// Memory that ends where it should, `shift` bytes behind a multiple of 64.
class cache_memory {
 public:
  cache_memory(std::size_t bytes, std::size_t shift)
      : all_(static_cast<unsigned char*>(::operator new(shift + bytes, line))), shift_(shift), bytes_(bytes) {
    std::fill_n(all_, shift + bytes, static_cast<unsigned char>(0xff));
  }
  ~cache_memory() { ::operator delete(all_, line); }
  cache_memory(const cache_memory&) = delete;
  cache_memory& operator=(const cache_memory&) = delete;

  diffattn::workspace view() const { return {all_ + shift_, bytes_}; }
  std::vector<unsigned char> contents() const { return {all_ + shift_, all_ + shift_ + bytes_}; }

 private:
  static constexpr std::align_val_t line{64};
  unsigned char* all_;
  std::size_t shift_, bytes_;
};

/// A cache beside its model. T: what calls on it compute in.
template <class T>
class tester {
 public:
  explicit tester(choices& c)
      : random_(static_cast<std::uint64_t>(c.integer(0, 255))),
        config_(any_config(c)),
        model_(config_),
        shift_(static_cast<std::size_t>(c.integer(0, 63))),
        memory_(new_memory()) {
    demand(cache_.open(config_, memory_->view()) == status::ok, "cannot be opened");
  }

  /// One operation.
  void step(choices& c) {
    const std::vector<unsigned char> before = memory_->contents();
    const index_t s = c.one_in(16) ? c.pick<index_t>({-1, config_.sequences}) : c.integer(0, config_.sequences - 1);
    const index_t length = cache_.length(s), begin = cache_.begin(s);
    const auto place = [&] { return c.one_in(8) ? c.integer(-2, length + 2) : c.integer(begin, length); };
    status got = status::ok, expected = status::ok;
    switch (c.integer(0, 11)) {
      case 4: {
        const index_t to = place();
        got = cache_.truncate(s, to), expected = model_.truncate(s, to);
        break;
      }
      case 5: {
        const index_t to = place();
        got = cache_.discard(s, to), expected = model_.discard(s, to);
        break;
      }
      case 6: {
        const index_t to = c.integer(c.one_in(8) ? -1 : 0, config_.sequences - (c.one_in(8) ? 0 : 1));
        got = cache_.fork(s, to), expected = model_.fork(s, to);
        break;
      }
      case 7: got = cache_.reset(s), expected = model_.reset(s); break;
      case 8:
        if (!c.one_in(4)) return move();
        got = c.coin() ? cache_.reset() : cache_.open(config_, memory_->view());
        model_ = model(config_);
        break;
      case 9: return open_wrongly(c);
      case 10:
      case 11:
        call(c);
        demand(memory_->contents() == before, "a call wrote to the cache");
        return;
      default:
        if constexpr (std::is_same_v<T, double>)
          append<double>(c, got, expected);
        else
          switch (c.integer(0, 2)) {
            case 0: append<float>(c, got, expected); break;
            case 1: append<diffattn::f16>(c, got, expected); break;
            default: append<diffattn::bf16>(c, got, expected);
          }
    }
    demand(got == expected, std::string("got: ") + message(got) + "; expected: " + message(expected));
    if (got != status::ok) demand(memory_->contents() == before, std::string("written after: ") + message(got));
    compare();
  }

 private:
  kv_cache_config any_config(choices& c) {
    kv_cache_config k;
    const test::family f = c.pick({test::family::interleaved, test::family::interleaved_adjacent, test::family::halves,
                                   test::family::shared, test::family::grouped, test::family::component_major});
    const index_t ratio = c.integer(1, 2);
    heads_ = test::choose_heads(f, 2, 2 / ratio, ratio, table_);
    const auto any_storage = [&] { return std::is_same_v<T, double> ? storage::f64 : test::float_storages[c.integer(0, 4)]; };
    k.heads = heads_.map, k.keys = any_storage(), k.values = any_storage();
    k.key_width = c.pick<index_t>({2, 1, 3, 8, 17, 33, 40}), k.value_width = c.pick<index_t>({1, 2, 5, 8, 16, 33});
    k.kind = c.pick({kv_cache_kind::contiguous, kv_cache_kind::ring, kv_cache_kind::paged, kv_cache_kind::paged});
    k.sequences = c.integer(1, 4), k.capacity = c.integer(1, 20), k.page_tokens = c.integer(1, 8);
    if (c.coin()) k.pages = c.integer(1, 10);
    return k;
  }
  std::unique_ptr<cache_memory> new_memory() const { return std::make_unique<cache_memory>(kv_cache_bytes(config_), shift_); }

  /// Sequences for the entries of a batch, sometimes wrong ones. Empty: all.
  std::vector<index_t> any_sequences(choices& c) {
    std::vector<index_t> to;
    if (c.one_in(4)) return to;
    const index_t first = c.integer(0, config_.sequences - 1), n = c.integer(1, config_.sequences);
    for (index_t i = 0; i < n; ++i) to.push_back((first + i) % config_.sequences);
    if (c.one_in(8)) to.back() = c.pick<index_t>({to.front(), -1, config_.sequences, index_t{1} << 60});
    return to;
  }

  template <class E>
  void append(choices& c, status& got, status& expected) {
    const std::vector<index_t> some = any_sequences(c);
    std::vector<index_t> to = some;
    for (index_t s = 0; some.empty() && s < config_.sequences; ++s) to.push_back(s);
    const index_t batch = static_cast<index_t>(to.size());
    const index_t n = c.one_in(8) ? c.integer(0, 2 * config_.capacity + 1) : c.integer(1, 3);
    test::owned_arrays memory;
    auto k = test::place_tensor<E>(c, memory, batch, n, heads_.k_heads, config_.key_width, E{});
    auto v = test::place_tensor<E>(c, memory, batch, n, heads_.v_heads, config_.value_width, E{});
    const double size = c.pick<double>({1, 1, 1e-3, 100});
    for (const auto* t : {&k, &v}) test::for_each(*t, [&](E& x) { x = test::element<E>(size * random_.normal()); });

    const index_t positions = c.one_in(8) ? 2 : 200, pairs = (config_.key_width) / 2;
    std::vector<float> cosines, sines;
    diffattn::rope_view rope;
    if (pairs > 0 && c.one_in(4)) {
      for (index_t i = 0; i < positions * pairs; ++i)
        cosines.push_back(std::cos(static_cast<float>(i))), sines.push_back(std::sin(static_cast<float>(i)));
      rope.cos = cosines.data(), rope.sin = sines.data(), rope.positions = positions, rope.width = 2 * pairs;
      rope.style = c.coin() ? diffattn::rope_style::half : diffattn::rope_style::interleaved;
    }
    const auto numbers = [](const test::tensor_view<E>& x, index_t b, index_t t) {
      std::vector<double> all;
      for (index_t h = 0; h < x.heads; ++h)
        for (index_t i = 0; i < x.width; ++i) all.push_back(test::number(x.at(b, t, h)[i]));
      return all;
    };
    std::vector<std::vector<token>> tokens(to.size());
    bool beyond = false;  // the table
    for (index_t b = 0; b < batch; ++b) {
      const index_t s = to[static_cast<std::size_t>(b)], length = model_.has(s) ? model_.at(s).length() : 0;
      beyond |= rope.is_given() && length + n > positions;
      for (index_t t = 0; t < n && !beyond; ++t) {
        token x{numbers(k, b, t), numbers(v, b, t), rope.is_given()};
        for (index_t h = 0; x.rotated && h < k.heads; ++h) rotate(rope, length + t, x.keys.data() + h * k.width);
        tokens[static_cast<std::size_t>(b)].push_back(std::move(x));
      }
    }
    const status fault = n > 0 && c.one_in(8) ? spoil(c, k, v) : status::ok;
    got = cache_.append(k, v, some.empty() ? nullptr : some.data(), rope);
    if (fault != status::ok)
      expected = fault;
    else if (beyond && n > 0 && (got == status::rope_position || got == status::cache_full))
      expected = got;  // whichever sequence is at fault first
    else
      expected = beyond && n > 0 ? status::cache_sequence : model_.append(to, tokens);
  }
  /// x [key width] as the table turns it.
  static void rotate(const diffattn::rope_view& r, index_t position, double* x) {
    for (index_t i = 0; i < r.width / 2; ++i) {
      const bool half = r.style == diffattn::rope_style::half;
      double &a = x[half ? i : 2 * i], &b = x[half ? i + r.width / 2 : 2 * i + 1];
      const double c = double(r.cos[position * (r.width / 2) + i]), s = double(r.sin[position * (r.width / 2) + i]);
      const double turned = a * c - b * s;
      b = b * c + a * s, a = turned;
    }
  }
  /// Something wrong with the tensors, and what must be said about it.
  template <class E>
  status spoil(choices& c, test::tensor_view<E>& k, test::tensor_view<E>& v) {
    switch (c.integer(0, 9)) {
      case 0: return k.data = nullptr, status::k_null;
      case 1: return v.data = nullptr, status::v_null;
      case 2: return k.tokens = -1, status::k_size;
      case 3: return v.batch_stride = index_t{1} << 60, status::v_size;
      case 4: return k.width_stride = 2, k.width > 1 ? status::k_width_stride : status::ok;
      case 5: return k.heads += c.pick<index_t>({1, -1, 100}), status::cache_key_shape;
      case 6: return v.width += 1, status::cache_value_shape;
      case 7: return v.tokens -= 1, status::cache_value_shape;
      case 8: return v.data = static_cast<E*>(memory_->view().data), status::cache_overlap;
      default: return k.width -= 1, k.width == 0 ? status::k_size : status::cache_key_shape;
    }
  }

  /// The same cache in other memory, by another handle.
  void move() {
    std::unique_ptr<cache_memory> to = new_memory();
    std::memcpy(to->view().data, memory_->view().data, to->view().bytes);
    kv_cache other;
    demand(other.attach(config_, to->view()) == status::ok, "cannot be attached");
    cache_ = other, memory_ = std::move(to);
    compare();
  }

  /// What cannot be opened changes neither memory nor handle.
  void open_wrongly(choices& c) {
    const std::vector<unsigned char> before = memory_->contents();
    kv_cache_config wrong = config_;
    diffattn::workspace place = memory_->view();
    index_t* const sizes[] = {&wrong.key_width, &wrong.value_width, &wrong.sequences, &wrong.capacity};
    const index_t which = c.integer(0, 8);
    if (which < 4) *sizes[which] = c.pick<index_t>({0, -1, index_t{1} << 57, std::numeric_limits<index_t>::min()});
    if (which == 4) wrong.kind = static_cast<kv_cache_kind>(7);
    if (which == 5) wrong.keys = std::is_same_v<T, double> ? storage::f32 : storage::f64;
    if (which == 6) wrong.heads = {};
    if (which == 7) place.bytes -= 1;
    if (which == 8) place.data = nullptr;
    const status expected = which < 7 ? check(wrong) : status::cache_memory;
    demand(expected != status::ok, "a wrong config is accepted");
    demand((c.coin() ? cache_.open(wrong, place) : cache_.attach(wrong, place)) == expected, "opened wrongly");
    demand(memory_->contents() == before, "written by an open that is refused");
    compare();
  }

  /// A call on the cache.
  void call(choices& c) {
    const std::vector<index_t> some = any_sequences(c);
    const index_t batch = some.empty() ? config_.sequences : static_cast<index_t>(some.size()), q_len = c.integer(1, 3);
    test::owned_arrays memory;
    diffattn::forward_args<T> a;
    const auto q = test::place_tensor<T>(c, memory, batch, q_len, heads_.q_heads, config_.key_width, T{});
    test::for_each(q, [&](T& x) { x = static_cast<T>(random_.normal()); });
    const index_t width = heads_.two_values ? 2 * config_.value_width : config_.value_width;
    a.q = q, a.out = test::place_tensor<T>(c, memory, batch, q_len, heads_.map.heads, width, T{});
    a.heads = heads_.map, a.lambda = T(0.5), a.norm = diffattn::head_norm<T>::none();
    a.cache = cache_.view(), a.sequences = some.empty() ? nullptr : some.data();
    a.mask.causal = c.coin();
    if (a.mask.causal && c.coin()) a.mask.window = c.integer(1, 6);
    a.schedule =
        c.pick({diffattn::schedule_choice::automatic, diffattn::schedule_choice::panels, diffattn::schedule_choice::stream});
    status expected = status::ok;
    for (const index_t s : some)
      if (!model_.has(s)) expected = status::cache_sequence;
    if (expected == status::ok)
      for (const test::sequence_piece& p : pieces_of(a)) {
        test::read_problem<T> r;
        read(a, p, r);
        for (index_t i = 0; i < q_len; ++i)
          for (index_t j = 0; j < a.cache.begin(some.empty() ? p.b : some[static_cast<std::size_t>(p.b)]); ++j)
            if (r.problem.allowed(0, i, j)) expected = status::cache_range;
      }
    const status got = test::run(a);
    demand(got == expected, std::string("a call gave: ") + message(got) + "; expected: " + message(expected));
    if (got != status::ok) return;
    const testing::AssertionResult near = test::near(a, test::results_of(a), test::expect(a));
    demand(near, near.message());
  }

  void compare() {
    const diffattn::kv_view v = cache_.view();
    demand(cache_.free_pages() == model_.free_pages(), "free pages differ");
    const double rounding = 4 * double(std::numeric_limits<T>::epsilon());
    for (index_t s = 0; s < config_.sequences; ++s) {
      const sequence& m = model_.at(s);
      demand(cache_.length(s) == m.length() && cache_.begin(s) == m.begin, "lengths differ");
      demand(v.length(s) == m.length() && v.begin(s) == m.begin, "lengths of the view differ");
      for (index_t t = m.begin; t < m.length(); ++t) {
        const token& x = m.tokens[static_cast<std::size_t>(t)];
        for (index_t h = 0; h < v.keys.heads; ++h)
          demand(holds(v.keys.type, stored_row(v, v.keys, s, t, h), x.keys.data() + h * v.keys.width, v.keys.width,
                       x.rotated ? rounding : 0),
                 "a key differs");
        for (index_t h = 0; h < v.values.heads; ++h)
          demand(
              holds(v.values.type, stored_row(v, v.values, s, t, h), x.values.data() + h * v.values.width, v.values.width, 0),
              "a value differs");
      }
    }
  }

  test::random_source random_;
  std::vector<diffattn::head_indices> table_;
  test::head_choice heads_;
  kv_cache_config config_;
  model model_;
  std::size_t shift_;
  std::unique_ptr<cache_memory> memory_;
  kv_cache cache_;
};

template <class T>
void try_operations(choices& c) {
  tester<T> t(c);
  for (int i = 0; i < 40 && !c.is_done(); ++i) t.step(c);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  testing::GTEST_FLAG(break_on_failure) = true;  // of the helpers that the tests share
  choices c(data, size);
  c.one_in(4) ? try_operations<double>(c) : try_operations<float>(c);
  return 0;
}

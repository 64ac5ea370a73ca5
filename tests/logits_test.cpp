// SPDX-License-Identifier: MIT
// What changes logits between product and softmax, in every combination, against the reference: soft cap, ALiBi, bias, boolean
// masks, block lists, predicates, sinks; of both maps and of each. All schedules, tensors and caches.

#include <gtest/gtest.h>

#include "support/problem.hpp"

namespace {

using diffattn::index_t;
using diffattn::logit_rules;
using diffattn::sight;

/// Which rules there are, and how their arrays lie.
struct choice {
  bool cap = false, slopes = false, bias = false, visible = false, blocks = false, predicate = false, sinks = false;
  bool per_head = true, per_batch = true, per_query = true, transposed = false, tiles = true;
  double hidden = 0.4;  ///< share of the keys that each hides
  std::string text() const {
    std::string s;
    const std::pair<bool, const char*> all[] = {{cap, "cap "},
                                                {slopes, "slopes "},
                                                {bias, "bias "},
                                                {visible, "visible "},
                                                {blocks, "blocks "},
                                                {predicate, "predicate "},
                                                {sinks, "sinks "},
                                                {per_head, "per head "},
                                                {per_batch, "per batch "},
                                                {per_query, "per query "},
                                                {transposed, "transposed "},
                                                {tiles, "tiles "}};
    for (const auto& [on, name] : all)
      if (on) s += name;
    return s;
  }
};

choice random_choice(test::random_source& random) {
  const auto coin = [&random] { return random.integer(0, 1) == 1; };
  choice c;
  c.cap = coin(), c.slopes = coin(), c.bias = coin(), c.visible = coin(), c.blocks = coin(), c.predicate = coin();
  c.sinks = coin(), c.per_head = coin(), c.per_batch = coin(), c.per_query = coin(), c.transposed = coin(), c.tiles = coin();
  c.hidden = static_cast<double>(random.integer(0, 3)) * 0.3;
  return c;
}

/// The rules of one map with what they point to, and the same for the reference.
template <class T>
class rule_set {
 public:
  rule_set(const choice& c, const test::spec& s, test::random_source& random) : choice_(c), spec_(s) {
    const index_t batch = c.per_batch ? s.batch : 1, heads = c.per_head ? s.heads : 1, queries = c.per_query ? s.q_len : 1;
    const index_t inner = c.transposed ? queries : s.kv_len, outer = c.transposed ? s.kv_len : queries;
    const auto view = [&](const auto* data) {
      using E = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
      diffattn::logit_view<E> v;
      v.data = data, v.head_stride = c.per_head ? outer * (inner + 1) : 0,
      v.batch_stride = c.per_batch ? heads * outer * (inner + 1) : 0;
      v.query_stride = !c.per_query ? 0 : c.transposed ? 1 : inner + 1, v.key_stride = c.transposed ? inner + 1 : 1;
      return v;
    };
    const std::size_t size = static_cast<std::size_t>(batch * heads * outer * (inner + 1));
    const auto hides = [&] { return random.integer(0, 999) < static_cast<index_t>(1000 * c.hidden); };
    if (c.cap) rules_.soft_cap = T(2.5);
    if (c.slopes) {
      for (index_t h = 0; h < s.heads; ++h) slopes_.push_back(static_cast<T>(0.05 * double(h + 1)));
      rules_.slopes = slopes_.data();
    }
    if (c.bias) {
      for (std::size_t i = 0; i < size; ++i)
        bias_.push_back(hides() ? -std::numeric_limits<T>::infinity() : static_cast<T>(2 * random.normal()));
      rules_.bias = view(bias_.data());
    }
    if (c.visible) {
      for (std::size_t i = 0; i < size; ++i)
        visible_.push_back(hides() ? 0 : static_cast<unsigned char>(random.integer(1, 255)));
      rules_.visible = view(visible_.data());
    }
    if (c.blocks) {
      const index_t query_block = random.integer(1, 40), key_block = random.integer(1, 70);
      const index_t rows = (s.q_len + query_block - 1) / query_block, columns = (s.kv_len + key_block - 1) / key_block;
      for (index_t list = 0; list < batch * heads; ++list) {
        for (index_t r = 0; r < rows; ++r) {
          begins_.push_back(static_cast<index_t>(keys_.size()));
          for (index_t k = 0; k < columns; ++k)
            if (!hides()) keys_.push_back(k);
        }
        begins_.push_back(static_cast<index_t>(keys_.size()));
      }
      rules_.blocks = {query_block,
                       key_block,
                       begins_.data(),
                       keys_.data(),
                       c.per_batch ? heads * (rows + 1) : 0,
                       c.per_head ? rows + 1 : 0};
    }
    if (c.predicate) {
      rules_.predicate.context = this;
      rules_.predicate.sees = [](const void* self, index_t b, index_t h, index_t i, index_t j) {
        return static_cast<const rule_set*>(self)->predicate(b, h, i, j);
      };
      if (c.tiles)
        rules_.predicate.tile = [](const void* self, index_t b, index_t h, index_t first, index_t last,
                                   diffattn::key_range keys) {
          bool some = false, all = true;
          for (index_t i = first; i <= last; ++i)
            for (index_t j = keys.begin; j < keys.end; ++j) {
              const bool sees = static_cast<const rule_set*>(self)->predicate(b, h, i, j);
              some |= sees, all &= sees;
            }
          return all ? sight::all : some ? sight::some : sight::none;
        };
    }
    if (c.sinks) {
      for (index_t h = 0; h < s.heads; ++h)
        sinks_.push_back(h % 3 == 2 ? -std::numeric_limits<T>::infinity() : static_cast<T>(random.normal()));
      rules_.sinks = sinks_.data();
    }
  }
  rule_set(const rule_set&) = delete;

  const logit_rules<T>& rules() const { return rules_; }

  bool shown(long b, long h, long i, long j) const {
    const auto at = [&](index_t per_b, index_t per_h, index_t per_i, index_t per_j) {
      return static_cast<std::size_t>(b * per_b + h * per_h + i * per_i + j * per_j);
    };
    const auto& v = rules_.visible;
    if (v.data && visible_[at(v.batch_stride, v.head_stride, v.query_stride, v.key_stride)] == 0) return false;
    if (choice_.predicate && !predicate(b, h, i, j)) return false;
    const diffattn::block_list& l = rules_.blocks;
    if (!l.begins) return true;
    const std::size_t row = static_cast<std::size_t>(b * l.batch_stride + h * l.head_stride + i / l.query_block);
    for (index_t k = begins_[row]; k < begins_[row + 1]; ++k)
      if (keys_[static_cast<std::size_t>(k)] == j / l.key_block) return true;
    return false;
  }
  double added(long b, long h, long i, long j, long own) const {
    double sum = 0;
    if (!slopes_.empty()) sum -= double(slopes_[static_cast<std::size_t>(h)]) * double(std::labs(own - j));
    const auto& v = rules_.bias;
    if (v.data)
      sum += double(
          bias_[static_cast<std::size_t>(b * v.batch_stride + h * v.head_stride + i * v.query_stride + j * v.key_stride)]);
    return sum;
  }
  std::vector<double> sinks() const { return {sinks_.begin(), sinks_.end()}; }

 private:
  /// A band with holes, so that there are tiles of every kind.
  bool predicate(long b, long h, long i, long j) const { return (i / 33 + j / 40 + h + b) % 3 != 0 && (i + j) % 7 != 3; }

  choice choice_;
  test::spec spec_;
  logit_rules<T> rules_;
  std::vector<T> slopes_, bias_, sinks_;
  std::vector<unsigned char> visible_;
  std::vector<index_t> begins_, keys_;
};

template <class T>
void verify(const test::spec& s, const choice& c1, const choice& c2, bool separate) {
  SCOPED_TRACE(s.text() + "; " + c1.text() + (separate ? "/ " + c2.text() : ""));
  test::random_source random(s.seed);
  test::problem<T> p(s);
  const rule_set<T> first(c1, s, random), second(c2, s, random);
  p.args().logits = first.rules();
  if (separate) p.args().logits_2 = &second.rules();
  reference::problem<T> r = p.for_reference();
  const rule_set<T>* const of_map[2] = {&first, separate ? &second : &first};
  r.shown = [&](int m, long b, long h, long i, long j) { return of_map[m]->shown(b, h, i, j); };
  r.added = [&](int m, long b, long h, long i, long j) { return of_map[m]->added(b, h, i, j, i + r.offset); };
  for (int m = 0; m < 2; ++m) r.cap[m] = double(of_map[m]->rules().soft_cap), r.sink[m] = of_map[m]->sinks();
  p.verify(reference::attention(r));
}

TEST(Logits, RandomRulesOfBothMaps) {
  test::random_source random(7);
  for (int i = 0; i < 150; ++i) {
    test::spec s;
    s.seed = 100 + static_cast<std::uint64_t>(i);
    s.batch = random.integer(1, 2), s.heads = random.integer(1, 2) * 2, s.kv = s.heads / 2;
    const index_t sizes[] = {1, 2, 7, 8, 9, 31, 32, 33, 64, 65, 127, 129, 150};
    s.q_len = sizes[random.integer(0, 12)], s.kv_len = sizes[random.integer(0, 12)];
    s.d = random.integer(1, 20), s.width = random.integer(1, 20);
    s.causal = random.integer(0, 1) == 1;
    if (s.causal && random.integer(0, 2) == 0) s.window = random.integer(1, 100);
    s.ranges = random.integer(0, 2) == 0;
    const choice c1 = random_choice(random), c2 = random_choice(random);
    const bool separate = random.integer(0, 1) == 1;
    verify<float>(s, c1, c2, separate);
    if (i % 3 == 0) verify<double>(s, c1, c2, separate);
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace

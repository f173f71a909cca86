// The next token of a row: the most likely one, or a random one of those that min_p, top_k and top_p keep, in this order.
// Equal to engine/sampling/device.py: it keeps the same tokens, equal ones together, and the draw goes through them in the
// same order, column by column. Its random numbers are those of `uniforms` of engine/sampling/sampler.py.

#pragma once

#include <vector>

#include "checks.h"
#include "columns.h"

namespace draws {

constexpr float kNothing = -87.0f;  // below this score a token has no weight
constexpr int kBinShift = 18;      // low bits of a weight that its bin ignores
constexpr int64_t kBins = (0x3f800000 >> kBinShift) + 1;  // up to weight 1

struct Ask {
  float temperature, top_p, min_p;
  int64_t top_k;
  double uniform;
};

// A thread's working memory, reused for every row.
struct Scratch {
  std::vector<float> maxima, weights, chosen, sums;
  std::vector<double> bins;
  std::vector<int64_t> tokens;
};

inline int64_t bin_of(float weight) {
  uint32_t bits;
  std::memcpy(&bits, &weight, sizeof bits);
  return std::min<int64_t>(bits >> kBinShift, kBins - 1);
}

inline double mass(const float* weights, int64_t size) {
  double total = 0;
  for (int64_t start = 0; start < size; start += 1024) {
    float lanes[16] = {};
    const int64_t end = std::min(size, start + 1024), whole = start + (end - start) / 16 * 16;
    for (int64_t i = start; i < whole; i += 16) {
      for (int64_t lane = 0; lane < 16; ++lane) lanes[lane] += weights[i + lane];
    }
    for (float lane : lanes) total += lane;
    for (int64_t i = whole; i < end; ++i) total += weights[i];
  }
  return total;
}

// The largest weight such that the weights from it upwards sum to at least `share`. Reorders the weights.
inline float floor_of_share(std::vector<float>& weights, double share) {
  float* low = weights.data();
  float* high = low + weights.size();
  double above = 0;
  while (high - low > 1) {
    const float a = *low, b = low[(high - low) / 2], c = high[-1];
    const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
    float* middle = std::partition(low, high, [&](float x) { return x > pivot; });
    const double greater = mass(low, middle - low);
    if (above + greater >= share) {
      high = middle;
      continue;
    }
    float* equal = std::partition(middle, high, [&](float x) { return x == pivot; });
    above += greater + static_cast<double>(equal - middle) * pivot;
    if (above >= share || equal == high) return pivot;
    low = equal;
  }
  return *low;
}

// The first token that has the logit `best`.
inline int64_t first_of(const Row& row, float best, const Scratch& s) {
  int64_t found = row.size;
  for (int64_t column = 0; column < row.columns; ++column) {
    if (s.maxima[column] != best) continue;
    for (int64_t token = column; token < found; token += row.columns) {
      if (row.logits[token] == best) found = token;
    }
  }
  return found;
}

inline float weight_of(float logit, float best, float temperature, float least) {
  const float score = (logit - best) / temperature;
  return score >= least ? exponential(score) : 0.0f;
}

// Lists the tokens with logits of at least `bound`, column by column, and their weights.
inline void gather(const Row& row, float best, float bound, float least, const Ask& ask, Scratch& s) {
  s.weights.clear();
  s.tokens.clear();
  each_from(row, s.maxima, bound, [&](int64_t token) {
    s.tokens.push_back(token);
    s.weights.push_back(weight_of(row.logits[token], best, ask.temperature, least));
  });
}

// Computes the weights of all tokens.
inline void weigh(const Row& row, float best, float least, const Ask& ask, Scratch& s) {
  s.tokens.clear();
  s.weights.resize(row.size);
  for (int64_t token = 0; token < row.size; ++token) {
    s.weights[token] = weight_of(row.logits[token], best, ask.temperature, least);
  }
}

inline double mass(const std::vector<float>& weights) { return mass(weights.data(), static_cast<int64_t>(weights.size())); }

// As floor_of_share, for many weights: first the bin in which the share is reached, then the weight within it. A bin
// holds the weights with equal leading bits, so bins are in the order of their weights.
inline float floor_by_bins(double share, Scratch& s) {
  s.bins.assign(kBins, 0.0);
  for (float weight : s.weights) s.bins[bin_of(weight)] += weight;
  int64_t bin = kBins - 1;
  while (bin > 0 && s.bins[bin] < share) share -= s.bins[bin--];
  s.chosen.clear();
  for (float weight : s.weights) {
    if (bin_of(weight) == bin) s.chosen.push_back(weight);
  }
  return s.chosen.empty() ? 0.0f : floor_of_share(s.chosen, share);
}

// Raises a floor to the one that top_p needs.
inline float share_floor(const Row& row, float floor, double top_p, Scratch& s) {
  if (floor > 0.0f) {
    for (float& weight : s.weights) weight = weight >= floor ? weight : 0.0f;
  }
  const double share = mass(s.weights) * top_p;
  if (!s.tokens.empty()) {
    s.chosen = s.weights;
    return floor_of_share(s.chosen, share);
  }
  // A short list is enough for most rows: the tokens that reach the maxima of the best quarter of the columns.
  s.chosen = s.maxima;
  const float bound = least_of_largest(s.chosen, std::max<int64_t>(row.columns / 4, 1));
  s.chosen.clear();
  each_from(row, s.maxima, bound, [&](int64_t token) { s.chosen.push_back(s.weights[token]); });
  return mass(s.chosen) >= share ? floor_of_share(s.chosen, share) : floor_by_bins(share, s);
}

inline int64_t draw_listed(float floor, double uniform, const Scratch& s) {
  double total = 0;
  for (float weight : s.weights) total += weight >= floor ? weight : 0.0f;
  double upto = 0;
  int64_t last = 0;
  for (int64_t place = 0; place < static_cast<int64_t>(s.tokens.size()); ++place) {
    if (s.weights[place] < floor || s.weights[place] == 0.0f) continue;
    last = s.tokens[place];
    upto += s.weights[place];
    if (upto > uniform * total) break;
  }
  return last;
}

inline int64_t draw_all(const Row& row, float floor, double uniform, Scratch& s) {
  s.sums.assign(row.columns, 0.0f);
  for (int64_t start = 0; start < row.size; start += row.columns) {
    const int64_t width = std::min(row.columns, row.size - start);
    float* weights = s.weights.data() + start;
    for (int64_t column = 0; column < width; ++column) {
      weights[column] = weights[column] >= floor ? weights[column] : 0.0f;
      s.sums[column] += weights[column];
    }
  }
  double total = 0;
  for (float sum : s.sums) total += sum;
  const double wanted = uniform * total;
  double upto = 0;
  int64_t last = 0;
  for (int64_t column = 0; column < row.columns; ++column) {
    if (s.sums[column] == 0.0f) continue;
    const bool here = upto + s.sums[column] > wanted;
    double within = upto;
    for (int64_t token = column; token < row.size; token += row.columns) {
      if (s.weights[token] == 0.0f) continue;
      last = token;
      within += s.weights[token];
      if (here && within > wanted) return token;
    }
    // Rounding may put the draw beyond the end of its column.
    if (here) return last;
    upto += s.sums[column];
  }
  return last;
}

inline bool is_short(const Row& row, const Ask& ask) {
  return !(ask.temperature > 0.0f) || (ask.top_k > 0 && ask.top_k <= row.columns && ask.top_k < row.size);
}

inline int64_t choose(const Row& row, const Ask& ask, bool& good, Scratch& s) {
  const bool ordered = scan(row, s.maxima);
  const float best = *std::max_element(s.maxima.begin(), s.maxima.end());
  good = ordered && std::isfinite(best);
  if (!good) return 0;
  if (!(ask.temperature > 0.0f)) return first_of(row, best, s);
  const float least = ask.min_p > 0.0f ? std::max(std::log(ask.min_p), kNothing) : kNothing;
  if (is_short(row, ask)) {
    s.chosen = s.maxima;
    gather(row, best, least_of_largest(s.chosen, ask.top_k), least, ask, s);
  } else {
    weigh(row, best, least, ask, s);
  }
  float floor = 0.0f;
  if (ask.top_k > 0 && ask.top_k < row.size) {
    s.chosen = s.weights;
    floor = std::max(floor, least_of_largest(s.chosen, ask.top_k));
  }
  if (ask.top_p < 1.0f) floor = std::max(floor, share_floor(row, floor, ask.top_p, s));
  return s.tokens.empty() ? draw_all(row, floor, ask.uniform, s) : draw_listed(floor, ask.uniform, s);
}

inline uint64_t splitmix(uint64_t start, uint64_t number) {
  uint64_t mixed = start + (number + 1) * 0x9E3779B97F4A7C15u;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
  return mixed ^ (mixed >> 31);
}

inline double uniform(uint64_t seed, int64_t position) {
  return static_cast<double>(splitmix(splitmix(seed, 0), position) >> 11) * 0x1p-53;
}

// The sampling parameters of the slots, a column each, and where the tokens go that are chosen with them.
class Slots {
 public:
  // columns: temperature, top_k, top_p, min_p, seed, tokens and whether their logits were finite, each by slot. May be
  // none: then nothing is chosen.
  Slots(const std::vector<at::Tensor>& columns, int64_t slots) : columns_(columns) {
    if (columns.empty()) return;
    constexpr at::ScalarType kTypes[] = {at::kFloat, at::kLong, at::kFloat, at::kFloat, at::kLong, at::kLong, at::kBool};
    TORCH_CHECK(columns.size() == std::size(kTypes), "columns: must be ", std::size(kTypes));
    for (size_t i = 0; i < columns.size(); ++i) {
      check_like(columns[i], kTypes[i], "columns");
      TORCH_CHECK(columns[i].numel() >= slots, "columns: must have a value for each slot");
    }
  }

  bool empty() const { return columns_.empty(); }

  // Chooses the token of a row, the one at `position` of the text in `slot`.
  void choose(const Row& row, int64_t slot, int64_t position) const {
    thread_local Scratch scratch;
    const Ask ask{value<float>(0, slot), value<float>(2, slot), value<float>(3, slot), value<int64_t>(1, slot),
                  uniform(static_cast<uint64_t>(value<int64_t>(4, slot)), position)};
    columns_[5].data_ptr<int64_t>()[slot] = draws::choose(row, ask, columns_[6].data_ptr<bool>()[slot], scratch);
  }

 private:
  template <typename Value>
  Value value(size_t column, int64_t slot) const {
    return columns_[column].const_data_ptr<Value>()[slot];
  }

  const std::vector<at::Tensor>& columns_;
};

}  // namespace draws

// Attention of texts that lie side by side, each over itself.

#pragma once

#include <limits>
#include <vector>

#include "encoder_places.h"
#include "encoder_rows.h"

// The attention of a layer. Rows of qkv hold `heads` queries, then kv_heads keys and as many values, of `dim` elements.
//
// reach           tokens before and behind a token that it sees; causal: none behind
// rotated         elements of a head that positions turn, by cosines and sines [positions, rotated / 2]; 0: none
// query_norm, key_norm  over the elements of a head
// places          what else is added by distance
// bias            added to scores by the distance from query to key, [heads, 2 far + 1], or null
struct AttentionParts {
  int64_t heads, kv_heads, dim, reach, rotated, far;
  float scale;
  bool causal;
  const float *cosines, *sines, *bias;
  Norm query_norm, key_norm;
  Places places;

  int64_t width() const { return (heads + 2 * kv_heads) * dim; }
};

// Some tokens of a text, which begins at row `first` and has `count` tokens: those from `from` to `to`.
struct Piece {
  int64_t first, count, from, to;
};

// The pieces of texts, one text after another.
inline void add_pieces(int64_t first, int64_t count, std::vector<Piece>& pieces) {
  const int64_t parts = (count + kQueryTokens - 1) / kQueryTokens;
  for (int64_t part = 0; part < parts; ++part) {
    pieces.push_back({first, count, part * count / parts, (part + 1) * count / parts});
  }
}

// How the products of an attention with rows of T are computed: over elements of type Element.
template <typename T>
struct FormOf {
  using Form = Singly;
  using Element = float;
};

#if defined(__AVX512BF16__)
template <>
struct FormOf<BFloat> {
  using Form = Paired;
  using Element = BFloat;
};
#endif

// Working memory of one thread.
struct AttentionMemory {
  std::vector<float> memory;
  float *queries, *sums, *best, *total, *rows, *keys, *values, *scores;

  void fit(int64_t tokens, int64_t dim) {
    const auto needed = static_cast<size_t>(tokens * (2 * dim + 2 + kSeen) + 3 * kSeen * dim);
    if (memory.size() < needed) memory.resize(needed);
    queries = memory.data();
    sums = queries + tokens * dim;
    scores = sums + tokens * dim;
    keys = scores + tokens * kSeen;
    values = keys + kSeen * dim;
    rows = values + kSeen * dim;
    best = rows + kSeen * dim;
    total = best + tokens;
  }
};

// target [padded] = a query or key, normed, turned to its position and scaled, with zeros behind it.
template <typename T, typename Element>
void prepare_head(const AttentionParts& parts, const Norm& norm, const T* from, int64_t position, float scale,
                  int64_t padded, Element* target) {
  const int64_t dim = parts.dim, half = parts.rotated / 2;
  std::fill(target + dim, target + padded, Element{});
  if constexpr (std::is_same_v<T, Element>) {
    if (!norm && half == 0 && scale == 1.0f) {
      std::copy(from, from + dim, target);
      return;
    }
  }
  static thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < dim) memory.resize(dim);
  float* values = memory.data();
#pragma omp simd
  for (int64_t i = 0; i < dim; ++i) values[i] = widen(from[i]);
  if (norm) norm(values, dim, values);
  const float *cosines = parts.cosines + position * half, *sines = parts.sines + position * half;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float one = values[i], other = values[i + half];
    values[i] = one * cosines[i] - other * sines[i];
    values[i + half] = other * cosines[i] + one * sines[i];
  }
#pragma omp simd
  for (int64_t i = 0; i < dim; ++i) narrow(values[i] * scale, target[i]);
}

// Writes the attention of one head's queries of a piece, with a running softmax over its keys and values.
template <typename T>
void attend_piece(const AttentionParts& parts, const Piece& piece, int64_t head, const T* qkv,
                  const int64_t* positions, T* out, AttentionMemory& memory) {
  using Form = typename FormOf<T>::Form;
  using Element = typename FormOf<T>::Element;
  using Product = typename Form::Product;
  constexpr int64_t kNumbers = Form::kNumbers;
  const int64_t dim = parts.dim, padded = padded_to<Form>(dim), width = parts.width();
  const int64_t tokens = piece.to - piece.from, kv = head / (parts.heads / parts.kv_heads);
  const T* text = qkv + piece.first * width;
  const int64_t* places = positions + piece.first;
  memory.fit(tokens, padded);
  for (int64_t i = 0; i < tokens; ++i) {
    float* query = memory.queries + i * padded;
    prepare_head(parts, parts.query_norm, text + (piece.from + i) * width + head * dim, places[piece.from + i],
                 parts.scale, padded, query);
    Form::lay_row(query, padded);
    memory.best[i] = std::numeric_limits<float>::lowest(), memory.total[i] = 0.0f;
  }
  std::fill(memory.sums, memory.sums + tokens * padded, 0.0f);
  auto* rows = reinterpret_cast<Element*>(memory.rows);
  const int64_t ahead = parts.causal ? 0 : parts.reach;
  const int64_t begin = std::max<int64_t>(piece.from - parts.reach, 0);
  const int64_t end = std::min(piece.count, piece.to + ahead);
  for (int64_t from = begin; from < end; from += kSeen) {
    const int64_t seen = std::min(kSeen, end - from);
    const int64_t columns = (seen + wide::kLanes - 1) / wide::kLanes * wide::kLanes;
    const T* keys = text + from * width + (parts.heads + kv) * dim;
    const T* values = keys + parts.kv_heads * dim;
    if (padded > dim || parts.key_norm || parts.rotated > 0) {
      for (int64_t k = 0; k < seen; ++k) {
        prepare_head(parts, parts.key_norm, keys + k * width, places[from + k], 1.0f, padded, rows + k * padded);
      }
      Form::turn_keys(rows, padded, seen, padded, memory.keys);
    } else {
      Form::turn_keys(keys, width, seen, dim, memory.keys);
    }
    if (padded > dim) {
      // Behind them lie the zeros of the keys.
      for (int64_t k = 0; k < seen; ++k) {
        for (int64_t d = 0; d < dim; ++d) narrow(widen(values[k * width + d]), rows[k * padded + d]);
      }
      Form::lay_values(rows, padded, seen, padded, memory.values);
    } else {
      Form::lay_values(values, width, seen, dim, memory.values);
    }
    multiply<Product, false>(tokens, memory.queries, padded, memory.keys, kSeen, columns, padded / kNumbers,
                             memory.scores, kSeen);
    if (parts.places.keys != nullptr) {
      parts.places.template add<Form>(head, piece.from - from, tokens, memory.queries, seen, memory.keys,
                                      memory.scores);
    }
    const bool all_see = from + parts.reach >= piece.to - 1 && from + columns <= piece.from + ahead + 1 &&
                         seen == columns && parts.bias == nullptr;
    for (int64_t i = 0; i < tokens && !all_see; ++i) {
      const int64_t token = piece.from + i;
      const int64_t first = std::clamp<int64_t>(token - parts.reach - from, 0, seen);
      const int64_t last = std::clamp<int64_t>(token + ahead + 1 - from, first, seen);
      float* scores = memory.scores + i * kSeen;
      if (parts.bias != nullptr) {
        const float* bias = parts.bias + head * (2 * parts.far + 1) + parts.far + from - token;
#pragma omp simd
        for (int64_t k = first; k < last; ++k) scores[k] += bias[k];
      }
      std::fill(scores, scores + first, kHidden), std::fill(scores + last, scores + columns, kHidden);
    }
    soften_rows(tokens, memory.scores, columns, memory.best, memory.total, memory.sums, padded);
    for (int64_t i = 0; i < tokens; ++i) Form::lay_row(memory.scores + i * kSeen, columns);
    multiply<Product, true>(tokens, memory.scores, kSeen, memory.values, padded, padded,
                            (seen + kNumbers - 1) / kNumbers, memory.sums, padded);
  }
  for (int64_t i = 0; i < tokens; ++i) {
    T* target = out + ((piece.first + piece.from + i) * parts.heads + head) * dim;
    const float inverse = 1.0f / memory.total[i];
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) narrow(memory.sums[i * padded + d] * inverse, target[d]);
  }
}

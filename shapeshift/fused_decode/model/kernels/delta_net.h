// The gated delta rule (arXiv:2412.06464) behind a causal convolution: what a layer with a state for each text computes
// between its linears. Storage is float or bfloat16; arithmetic, states and the inputs that they keep are float. Each
// token is computed by itself, so a text has the same bits in whatever pieces it comes.

#pragma once

#include <vector>

#include "wide.h"

namespace delta {

constexpr float kLeastSquares = 1e-6f;  // added to the sum of squares of queries and keys
constexpr float kLargest = 20.0f;       // beyond it log(1 + e^x) is x

// Tokens of one text: `count` of them, from `token` on in the batch, at `position` in the text of `slot`.
// replayed: whether the state has the first of them already.
struct Run {
  int32_t slot, position, token, count, replayed;
};

constexpr int64_t kRunFields = sizeof(Run) / sizeof(int32_t);

template <typename T>
struct Net {
  const T* inputs;      // [tokens, channels + values]: queries, keys and values, then the gates of the outputs
  const float* gates;   // [tokens, 2 heads]: how much is new, then how much stays, before their functions
  const float* weight;  // [kernel, channels], the oldest token first
  const float* decay;   // [heads], below 0
  const float* bias;    // [heads]
  const float* norm;    // [value_dim]
  float* window;        // [slots, kernel, channels]: the inputs of position p at p % kernel
  float* state;         // [slots, heads, key_dim, value_dim]
  float* mixed;         // [tokens, channels]: what the convolution makes of the inputs
  float* shares;        // [tokens, 2 heads]: of the new value, and of the state
  float* sums;          // [tokens, values]
  T* out;               // [tokens, values]
  int64_t key_heads, heads, key_dim, value_dim, kernel;
  float eps;

  int64_t keys() const { return key_heads * key_dim; }
  int64_t values() const { return heads * value_dim; }
  int64_t channels() const { return 2 * keys() + values(); }
  const T* input(int64_t token) const { return inputs + token * (channels() + values()); }
  float* kept(const Run& run, int64_t position) const {
    return window + (run.slot * kernel + position % kernel) * channels();
  }
};

// target = the vector over its length, times scale.
inline void normalise(float* vector, int64_t width, float scale) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < width; ++i) squares += vector[i] * vector[i];
  const float factor = scale / std::sqrt(squares + kLeastSquares);
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) vector[i] *= factor;
}

template <typename Element>
void add_product(const Element* source, const float* weight, int64_t width, float* target) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) target[i] += weight[i] * widen(source[i]);
}

// What comes before the rule, for token `index` of a run.
template <typename T>
void convolve(const Net<T>& net, const Run& run, int64_t index) {
  const int64_t channels = net.channels(), token = run.token + index, position = run.position + index;
  float* mixed = net.mixed + token * channels;
  std::fill(mixed, mixed + channels, 0.0f);
  for (int64_t tap = 0; tap < net.kernel; ++tap) {
    const int64_t behind = net.kernel - 1 - tap, at = position - behind;
    const float* weight = net.weight + tap * channels;
    if (at < 0) continue;
    if (behind <= index) {
      add_product(net.input(token - behind), weight, channels, mixed);
    } else {
      add_product(net.kept(run, at), weight, channels, mixed);
    }
  }
#pragma omp simd
  for (int64_t i = 0; i < channels; ++i) mixed[i] = silu(mixed[i]);
  const float scale = 1.0f / std::sqrt(static_cast<float>(net.key_dim));
  for (int64_t head = 0; head < 2 * net.key_heads; ++head) {
    normalise(mixed + head * net.key_dim, net.key_dim, head < net.key_heads ? scale : 1.0f);
  }
  const float* gates = net.gates + token * 2 * net.heads;
  float* shares = net.shares + token * 2 * net.heads;
  for (int64_t head = 0; head < net.heads; ++head) {
    const float step = gates[net.heads + head] + net.bias[head];
    shares[head] = 1.0f / (1.0f + std::exp(-gates[head]));
    shares[net.heads + head] = std::exp(net.decay[head] * (step > kLargest ? step : std::log1p(std::exp(step))));
  }
}

// Numbers in vectors, and one by one. A type with an alignment of its own is no argument of a template.
struct Widely {
  using Number = wide::Wide;
  static constexpr int64_t kLanes = wide::kLanes;
  static Number load(const float* source) { return wide::load(source); }
  static void store(const Number& value, float* target) { wide::store(value, target); }
};

struct Singly {
  using Number = float;
  static constexpr int64_t kLanes = 1;
  static Number load(const float* source) { return *source; }
  static void store(Number value, float* target) { *target = value; }
};

// The rule for a head of a run, in `kVectors` vectors of columns of its state from `column` on.
template <typename Form, int64_t kVectors, typename T>
void advance(const Net<T>& net, const Run& run, int64_t head, int64_t column) {
  using Number = typename Form::Number;
  constexpr int64_t kLanes = Form::kLanes;
  const int64_t width = net.value_dim, depth = net.key_dim, key_head = head / (net.heads / net.key_heads);
  float* state = net.state + (run.slot * net.heads + head) * depth * width + column;
  for (int64_t token = run.token; token < run.token + run.count; ++token) {
    const float* query = net.mixed + token * net.channels() + key_head * depth;
    const float* key = query + net.keys();
    const float* value = net.mixed + token * net.channels() + 2 * net.keys() + head * width + column;
    // One loop for both: another one rounds in another way. What is replayed adds nothing, and all of the state stays.
    Number sums[kVectors] = {}, fresh[kVectors] = {};
    const bool is_replayed = run.replayed && token == run.token;
    const float added = net.shares[token * 2 * net.heads + head];
    const float stays = is_replayed ? 1.0f : net.shares[token * 2 * net.heads + net.heads + head];
    if (!is_replayed) {
      for (int64_t d = 0; d < depth; ++d) {
        for (int64_t v = 0; v < kVectors; ++v) fresh[v] += key[d] * Form::load(state + d * width + v * kLanes);
      }
      for (int64_t v = 0; v < kVectors; ++v) {
        fresh[v] = (Form::load(value + v * kLanes) - stays * fresh[v]) * added;
      }
    }
    for (int64_t d = 0; d < depth; ++d) {
      float* row = state + d * width;
      for (int64_t v = 0; v < kVectors; ++v) {
        const Number next = stays * Form::load(row + v * kLanes) + key[d] * fresh[v];
        sums[v] += query[d] * next;
        Form::store(next, row + v * kLanes);
      }
    }
    float* target = net.sums + token * net.values() + head * width + column;
    for (int64_t v = 0; v < kVectors; ++v) Form::store(sums[v], target + v * kLanes);
  }
}

// The rule for a head of a run, and a head's share of the inputs that later tokens need.
template <typename T>
void recur(const Net<T>& net, const Run& run, int64_t head) {
  constexpr int64_t kVectors = 4;  // of which all rows of a state fit L1
  const int64_t width = net.value_dim, size = net.key_dim * width;
  if (run.position == 0) {
    float* state = net.state + (run.slot * net.heads + head) * size;
    std::fill(state, state + size, 0.0f);
  }
  int64_t column = 0;
  for (; column + kVectors * wide::kLanes <= width; column += kVectors * wide::kLanes) {
    advance<Widely, kVectors>(net, run, head, column);
  }
  for (; column + wide::kLanes <= width; column += wide::kLanes) advance<Widely, 1>(net, run, head, column);
  for (; column < width; ++column) advance<Singly, 1>(net, run, head, column);
  const int64_t first = head * net.channels() / net.heads, end = (head + 1) * net.channels() / net.heads;
  for (int64_t index = std::max<int64_t>(0, run.count - net.kernel); index < run.count; ++index) {
    const T* input = net.input(run.token + index);
    float* kept = net.kept(run, run.position + index);
    for (int64_t i = first; i < end; ++i) kept[i] = widen(input[i]);
  }
}

// The norm of a token's outputs, head by head, times their gates.
template <typename T>
void finish(const Net<T>& net, int64_t token) {
  const int64_t width = net.value_dim;
  for (int64_t head = 0; head < net.heads; ++head) {
    const float* sums = net.sums + token * net.values() + head * width;
    const T* gate = net.input(token) + net.channels() + head * width;
    T* out = net.out + token * net.values() + head * width;
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; ++i) squares += sums[i] * sums[i];
    const float inverse = 1.0f / std::sqrt(squares / static_cast<float>(width) + net.eps);
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) narrow(sums[i] * inverse * net.norm[i] * silu(widen(gate[i])), out[i]);
  }
}

// All runs, which follow one another in the batch.
template <typename T, typename Share>
void run_all(const Net<T>& net, const Run* runs, int64_t count, const Share& share) {
  // The run of each token.
  std::vector<const Run*> owners;
  for (const Run* run = runs; run < runs + count; ++run) owners.insert(owners.end(), run->count, run);
  const auto tokens = static_cast<int64_t>(owners.size());
  const int64_t first = count > 0 ? runs[0].token : 0;
  share(tokens, [&](int64_t i) { convolve(net, *owners[i], first + i - owners[i]->token); });
  share(count * net.heads, [&](int64_t task) { recur(net, runs[task / net.heads], task % net.heads); });
  share(tokens, [&](int64_t i) { finish(net, first + i); });
}

}  // namespace delta

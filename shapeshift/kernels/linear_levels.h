// Products of quantised rows with weights in levels: summed exactly in integers within a group, by AMX tiles, by dot
// products of quads (VNNI), or by plain vectors. A row's result does not depend on the other rows.

#pragma once

#include "level_tiles.h"
#include "wide.h"

constexpr int64_t kQuadRows = 8;     // rows of a tile of vectors
constexpr int64_t kGroupedRows = 6;  // the same with the sums of a group and those of all groups
constexpr int64_t kPlainRows = 4;    // the same without wide registers
constexpr int64_t kFetchQuads = 16;  // inputs between two fetches

inline wide::Wide spread(int32_t value) { return wide::Wide{} + static_cast<float>(value); }

// Four adjacent levels of a row.
inline int32_t quad_of(const int8_t* row, int64_t input) {
  int32_t quad;
  std::memcpy(&quad, row + input, sizeof quad);
  return quad;
}

#if defined(__AVX512VNNI__)
// sums [kRows, kWide] of a group.
template <int64_t kRows>
void sum_quads(const Group<8>& group, const QuantisedRows& from, Fetch next, int32_t* sums) {
  __m512i held[kRows][kTiles];
  for_constants<kRows>([&](auto row) { held[row][0] = held[row][1] = _mm512_setzero_si512(); });
  const int64_t stride = from.stride();
  for (int64_t input = group.begin; input < group.end; input += kQuad) {
    if (input % kFetchQuads == 0) next.step(group.panel + input * kWide, kFetchQuads * kWide);
    const __m512i weights[kTiles] = {line_of(group, input, 0), line_of(group, input, 1)};
    for_constants<kRows>([&](auto row) __attribute__((always_inline)) {
      const __m512i given = _mm512_set1_epi32(quad_of(from.levels + row * stride, input));
      for_constants<kTiles>([&](auto tile) __attribute__((always_inline)) {
        held[row][tile] = _mm512_dpbusd_epi32(held[row][tile], weights[tile], given);
        // Else the compiler copies each sum, before and after.
        asm("" : "+v"(held[row][tile]));
      });
    });
  }
  for_constants<kRows>([&](auto row) {
    for_constants<kTiles>([&](auto tile) {
      _mm512_storeu_si512(sums + row * kWide + tile * kSide, held[row][tile]);
    });
  });
}

// held [kRows, kWide] = kRows rows times a panel: of each group the sums, less what its zeros are in them, times the
// scales of weights and row, plus what its minima add. Small groups end often, so both kinds of sums stay in registers.
template <int64_t kRows, int64_t kBits>
void multiply_quads(const Panels<Levels<kBits>>& own, const uint8_t* weights, const float* scales, const uint8_t* zeros,
                    const float* minima, const QuantisedRows& from, float* held) {
  wide::Wide values[kRows][kTiles] = {};
  const int64_t stride = from.stride();
  for (int64_t i = 0; i < own.groups(); ++i, scales += kWide, zeros += kWide) {
    const Group<kBits> group{own, weights, i * own.group, own.end(i)};
    __m512i sums[kRows][kTiles] = {};
    for (int64_t input = group.begin; input < group.end; input += kQuad) {
      // A panel is so small that the next one is soon.
      if (input % kFetchQuads == 0) fetch(group.line(input, 0) + kSoon, kFetchQuads * kWide * kBits / 8);
      const __m512i quads[kTiles] = {line_of(group, input, 0), line_of(group, input, 1)};
      for_constants<kRows>([&](auto row) __attribute__((always_inline)) {
        const __m512i given = _mm512_set1_epi32(quad_of(from.levels + row * stride, input));
        for_constants<kTiles>([&](auto tile) __attribute__((always_inline)) {
          sums[row][tile] = _mm512_dpbusd_epi32(sums[row][tile], quads[tile], given);
          // Else the compiler copies each sum, before and after.
          asm("" : "+v"(sums[row][tile]));
        });
      });
    }
    __m512i own_zeros[kTiles];
    wide::Wide scale[kTiles], least[kTiles] = {};
    for_constants<kTiles>([&](auto tile) __attribute__((always_inline)) {
      own_zeros[tile] =
          _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros + tile * kSide)));
      scale[tile] = wide::load(scales + tile * kSide);
      if (minima != nullptr) least[tile] = wide::load(minima + tile * kSide);
    });
    for_constants<kRows>([&](auto row) __attribute__((always_inline)) {
      const int32_t total = from.sum(row, group.begin, group.end);
      const float own_scale = from.from(row).scales[i];
      for_constants<kTiles>([&](auto tile) __attribute__((always_inline)) {
        const __m512i less = _mm512_mullo_epi32(own_zeros[tile], _mm512_set1_epi32(total));
        const __m512i exact = _mm512_sub_epi32(sums[row][tile], less);
        const auto numbers = reinterpret_cast<wide::Wide>(_mm512_cvtepi32_ps(exact));
        values[row][tile] = wide::multiply_add(scale[tile] * own_scale, numbers, values[row][tile]);
        if (minima != nullptr) {
          values[row][tile] = wide::multiply_add(least[tile] * own_scale, spread(total), values[row][tile]);
        }
      });
    });
    if (minima != nullptr) minima += kWide;
  }
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t tile = 0; tile < kTiles; ++tile) wide::store(values[row][tile], held + row * kWide + tile * kSide);
  }
}
#endif

#if defined(__AVX2__)
constexpr int64_t kOctet = 8;  // outputs of a vector of quads

// Octets that kRows rows take at once: few rows take all outputs, so that memory brings one after another.
template <int64_t kRows>
constexpr int64_t kOctets = kRows <= 2 ? kWide / kOctet : 2;

inline void hold(__m256i& vector) { asm("" : "+x"(vector)); }

inline __m256i octet_at(const void* place) { return _mm256_loadu_si256(static_cast<const __m256i*>(place)); }

// sums [kRows, kWide] = (first ? 0 : sums) + rows, kInputs apart, times the levels from input `begin` to `end`, while
// `bytes` at `ahead` are fetched. Rows lie in 16 bits, of each quad the even inputs first: so levels of 8 bits are
// taken apart most easily. No lambda takes the sums, which would lie in memory.
template <int64_t kRows>
void add_quads(const Group<8>& group, int64_t begin, int64_t end, const int16_t* rows, bool first, int32_t* sums,
               const uint8_t* ahead, int64_t bytes) {
  constexpr int64_t kTurns = kWide / kOctet / kOctets<kRows>;
  const int64_t step = bytes * kFetchQuads / ((end - begin) * kTurns);
  for (int64_t turn = 0; turn < kTurns; ++turn, sums += kOctets<kRows> * kOctet) {
    __m256i held[kRows][kOctets<kRows>];
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t i = 0; i < kOctets<kRows>; ++i) {
        held[row][i] = first ? _mm256_setzero_si256() : octet_at(sums + row * kWide + i * kOctet);
      }
    }
    const int16_t* given = rows;
    for (int64_t input = begin; input < end; input += kQuad) {
      if (input % kFetchQuads == 0) fetch(ahead, step), ahead += step;
      const uint8_t* quads = group.line(input, 0) + turn * kOctets<kRows> * kOctet * kQuad;
#pragma GCC unroll 2
      for (int64_t odd = 0; odd < 2; ++odd, given += kQuad / 2) {
        __m256i levels[kOctets<kRows>];
        for (int64_t i = 0; i < kOctets<kRows>; ++i) {
          const __m256i both = octet_at(quads + i * kOctet * kQuad);
          levels[i] = odd ? _mm256_srli_epi16(both, 8) : _mm256_and_si256(both, _mm256_set1_epi16(255));
          hold(levels[i]);
        }
        for (int64_t row = 0; row < kRows; ++row) {
          int32_t pair;
          std::memcpy(&pair, given + row * kInputs, sizeof pair);
          for (int64_t i = 0; i < kOctets<kRows>; ++i) {
            held[row][i] = _mm256_add_epi32(held[row][i], _mm256_madd_epi16(levels[i], _mm256_set1_epi32(pair)));
            hold(held[row][i]);
          }
        }
      }
    }
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t i = 0; i < kOctets<kRows>; ++i) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + row * kWide + i * kOctet), held[row][i]);
      }
    }
  }
}

// sums [rows, kWide] of a group.
inline void sum_in_vectors(const Group<8>& group, const QuantisedRows& from, int64_t rows, int32_t* sums) {
  alignas(kLine) static thread_local int16_t widened[kMostRows * kInputs];
  const __m128i even_first = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  for (int64_t begin = group.begin; begin < group.end; begin += kInputs) {
    const int64_t end = std::min(begin + kInputs, group.end);
    for (int64_t row = 0; row < rows; ++row) {
      const int8_t* levels = from.levels + row * from.stride() + begin;
      int16_t* target = widened + row * kInputs;
      for (int64_t input = 0; input < end - begin; input += kSide) {
        const __m128i quads = _mm_loadu_si128(reinterpret_cast<const __m128i*>(levels + input));
        const __m256i parted = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(quads, even_first));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + input), parted);
      }
    }
    in_numbered_parts<kPlainRows>(rows, [&](int64_t row, auto count, int64_t part, int64_t parts) {
      const int64_t bytes = (end - begin) * kWide / parts;
      add_quads<count>(group, begin, end, widened + row * kInputs, begin == group.begin, sums + row * kWide,
                       group.line(end, 0) + part * bytes, bytes);
    });
  }
}

// sums [kRows, kWide] of a group. Two octets are those whose levels share bytes. No lambda takes the sums, which would
// lie in memory.
template <int64_t kRows>
void sum_levels(const Group<4>& group, const QuantisedRows& from, int32_t* sums) {
  constexpr int64_t kTurns = kWide / kOctet / kOctets<kRows>;
  const int64_t stride = from.stride();
  for (int64_t turn = 0; turn < kTurns; ++turn) {
    const auto octet = [&](int64_t i) { return turn + i * kTurns; };
    __m256i held[kRows][kOctets<kRows>] = {};
    const int8_t* given = from.levels + group.begin;
    for (int64_t part = group.begin; part < group.end; part += kPart) {
      __m256i pairs[kRows][kOctets<kRows>];
#pragma GCC unroll 8
      for (int64_t ahead = 0; ahead < kPart; ahead += kQuad, given += kQuad) {
        __m256i levels[kOctets<kRows>];
        for (int64_t i = 0; i < kOctets<kRows>; ++i) {
          const int64_t tile = octet(i) * kOctet / kSide, place = octet(i) * kOctet % kSide * kQuad;
          const __m256i line = octet_at(group.line(part + ahead, tile) + place);
          levels[i] = _mm256_and_si256(tile ? _mm256_srli_epi16(line, 4) : line, _mm256_set1_epi8(15));
          hold(levels[i]);
        }
        for (int64_t row = 0; row < kRows; ++row) {
          const __m256i quad = _mm256_set1_epi32(quad_of(given, row * stride));
          for (int64_t i = 0; i < kOctets<kRows>; ++i) {
            // In 16 bits: at most 16 x 15 x 127.
            const __m256i more = _mm256_maddubs_epi16(levels[i], quad);
            pairs[row][i] = ahead == 0 ? more : _mm256_add_epi16(pairs[row][i], more);
            hold(pairs[row][i]);
          }
        }
      }
      for (int64_t row = 0; row < kRows; ++row) {
        for (int64_t i = 0; i < kOctets<kRows>; ++i) {
          held[row][i] = _mm256_add_epi32(held[row][i], _mm256_madd_epi16(pairs[row][i], _mm256_set1_epi16(1)));
        }
      }
    }
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t i = 0; i < kOctets<kRows>; ++i) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + row * kWide + octet(i) * kOctet), held[row][i]);
      }
    }
  }
}

inline void sum_in_vectors(const Group<4>& group, const QuantisedRows& from, int64_t rows, int32_t* sums) {
  const int64_t share = (group.end - group.begin) * kWide / 2;
  in_numbered_parts<kPlainRows>(rows, [&](int64_t row, auto count, int64_t part, int64_t parts) {
    // With a few rows the CPU's own fetching does better alone.
    if (parts > 1) fetch(group.line(group.begin, 0) + kSoon + part * share / parts, share / parts);
    sum_levels<count>(group, from.from(row), sums + row * kWide);
  });
}
#else
template <int64_t kBits>
void sum_in_vectors(const Group<kBits>& group, const QuantisedRows& from, int64_t rows, int32_t* sums) {
  std::memset(sums, 0, rows * kWide * sizeof(int32_t));
  for (int64_t input = group.begin; input < group.end; input += kQuad) {
    for (int64_t lane = 0; lane < kWide; ++lane) {
      const int64_t tile = lane / kSide;
      const uint8_t* quad = group.line(input, tile) + lane % kSide * kQuad;
      for (int64_t row = 0; row < rows; ++row) {
        const int8_t* given = from.levels + row * from.stride() + input;
        for (int64_t i = 0; i < kQuad; ++i) {
          const int32_t level = kBits == 8 ? quad[i] : quad[i] >> (4 * tile) & 15;
          sums[row * kWide + lane] += level * given[i];
        }
      }
    }
  }
}
#endif

// sums [rows, kWide] of a group.
template <int64_t kBits>
void sum_rows(const Group<kBits>& group, const QuantisedRows& from, int64_t rows, int32_t* sums) {
#if defined(__AVX512VNNI__)
  if constexpr (kBits == 8) {
    if (group.own.instructions != Instructions::kPlain) {
      const int64_t bytes = group.own.blocks() * group.own.kBytes;
      return in_fetching_parts<kQuadRows>(rows, bytes, [&](int64_t row, auto count, const Fetch& fetch) {
        sum_quads<count>(group, from.from(row), fetch, sums + row * kWide);
      });
    }
  }
#endif
  sum_in_vectors(group, from, rows, sums);
}

// Adds the sums [rows, kWide] of group `i`, less what its zeros are in them, times the scales of weights and rows, plus what its minima add to held
// [rows, kWide]; calls each(row, lane, values) with what the row's are then, from `lane` on. kFirst: nothing is held
// yet. kZeros: there are zeros in the sums. minima: or null.
template <bool kFirst, bool kZeros, int64_t kBits, typename Each>
void add_group(const Group<kBits>& group, const float* scales, const uint8_t* zeros, const float* minima,
               const QuantisedRows& from, int64_t i, int64_t first, int64_t rows, const int32_t* sums,
               const float* held, const Each& each) {
  alignas(kLine) int32_t less[kWide];
  if constexpr (kZeros) std::copy(zeros, zeros + kWide, less);
  sums += first * kWide, held += first * kWide;
  for (int64_t row = first; row < first + rows; ++row, sums += kWide, held += kWide) {
    const float scale = from.from(row).scales[i];
    const int32_t total = kZeros || minima != nullptr ? from.sum(row, group.begin, group.end) : 0;
    for (int64_t lane = 0; lane < kWide; lane += wide::kLanes) {
      wide::Ints levels = wide::load(sums + lane);
      if constexpr (kZeros) levels -= wide::load(less + lane) * total;
      const wide::Wide before = kFirst ? wide::Wide{} : wide::load(held + lane);
      wide::Wide values = wide::multiply_add(wide::load(scales + lane) * scale, wide::numbers(levels), before);
      if (minima != nullptr) values = wide::multiply_add(wide::load(minima + lane) * scale, spread(total), values);
      each(row, lane, values);
    }
  }
}

// out [rows, outputs] of one panel = rows times the panel, plus bias; at most kMostRows rows.
template <int64_t kBits, typename Out>
void multiply_panel(const Panels<Levels<kBits>>& own, int64_t index, const QuantisedRows& from, int64_t rows,
                    Out* out) {
  alignas(kLine) int32_t sums[kMostRows * kWide];
  alignas(kLine) float held[kMostRows * kWide];
  alignas(kLine) float added[kWide] = {};
  alignas(kLine) Out part[kWide];
  const int64_t first = index * kWide, width = std::min(kWide, own.outputs - first);
  if (own.bias != nullptr) std::memcpy(added, own.bias + first, width * sizeof(float));
  const auto hold = [&](int64_t row, int64_t lane, const wide::Wide& values) {
    wide::store(values, held + row * kWide + lane);
  };
  const auto finish = [&](int64_t row, int64_t lane, const wide::Wide& values) {
    Out* place = out + row * own.outputs + first;
    wide::store(values + wide::load(added + lane), (width == kWide ? place : part) + lane);
    if (width < kWide && lane + wide::kLanes == kWide) std::memcpy(place, part, width * sizeof(Out));
  };
  const uint8_t* weights = own.weights + index * own.blocks() * own.kBytes;
  const float* scales = own.scales + index * own.groups() * kWide;
  const uint8_t* zeros = own.zeros + index * own.groups() * kWide;
  const float* minima = own.minima == nullptr ? nullptr : own.minima + index * own.groups() * kWide;
  const auto settle = [&](const Group<kBits>& group, int64_t i, int64_t row, int64_t count, auto has_zeros) {
    constexpr bool kZeros = decltype(has_zeros)::value;
    const auto add = [&](auto is_first, const auto& each) {
      add_group<decltype(is_first)::value, kZeros>(group, scales + i * kWide, zeros + i * kWide,
                                                   minima == nullptr ? nullptr : minima + i * kWide, from, i, row,
                                                   count, sums, held, each);
    };
    const bool last = i + 1 == own.groups();
    if (i == 0) {
      last ? add(std::true_type{}, finish) : add(std::true_type{}, hold);
    } else {
      last ? add(std::false_type{}, finish) : add(std::false_type{}, hold);
    }
  };
#if defined(__AMX_INT8__)
  if (own.instructions == Instructions::kTiles && rows >= kTileRows) {
    const std::bool_constant<!kCentred<kBits>> has_zeros{};
    sum_by_tiles(own, weights, zeros, from, rows, sums,
                 [&](const Group<kBits>& group, int64_t i, int64_t row, int64_t count) {
                   settle(group, i, row, count, has_zeros);
                 });
    return;
  }
#endif
#if defined(__AVX512VNNI__)
  if (own.instructions != Instructions::kPlain && (kBits == 4 || own.groups() > 1)) {
    in_parts<kGroupedRows>(rows, [&](int64_t row, auto count) {
      multiply_quads<count>(own, weights, scales, zeros, minima, from.from(row), held + row * kWide);
    });
    for (int64_t i = 0; i < rows * kWide; i += wide::kLanes) finish(i / kWide, i % kWide, wide::load(held + i));
    return;
  }
#endif
  for (int64_t i = 0; i < own.groups(); ++i) {
    const Group<kBits> group{own, weights, i * own.group, own.end(i)};
    sum_rows(group, from, rows, sums);
    settle(group, i, 0, rows, std::true_type{});
  }
}

// out [rows, outputs] = rows times the weights, plus bias.
template <int64_t kBits, typename Out, typename Share>
void multiply(const Panels<Levels<kBits>>& own, const QuantisedRows& from, int64_t rows, Out* out,
              const Share& share) {
  cross(own.count(), rows, kHigh, kHigh, share, [&](int64_t panel, int64_t row, int64_t count) {
    multiply_panel(own, panel, from.from(row), count, out + row * own.outputs);
  });
}

// Encoders whose weights are float or bfloat16.

#include "encoder.h"

namespace {

// The outputs of a panel of float, by which the packed weights of one kind of CPU differ from those of another.
int64_t panel() { return kPanel; }

// The keys or queries FLOAT [heads, count, dim] of places as an encoder whose values are of this type reads them.
Tensor place_keys(const Tensor& keys, at::ScalarType type) {
  check_like(keys, at::kFloat, "keys", 3);
  using Half = FormOf<BFloat>;
  return type == at::kFloat ? lay_keys<Singly, float>(keys) : lay_keys<Half::Form, Half::Element>(keys);
}

Tensor place_queries(const Tensor& queries, at::ScalarType type) {
  check_like(queries, at::kFloat, "queries", 3);
  return type == at::kFloat ? lay_queries<Singly>(queries) : lay_queries<FormOf<BFloat>::Form>(queries);
}

}  // namespace

TORCH_LIBRARY(shapeshift_encode, library) {
  library.def("pack(Tensor weight) -> Tensor");
  library.def("panel() -> int", &panel);
  library.def("place_keys(Tensor keys, ScalarType type) -> Tensor", &place_keys);
  library.def("place_queries(Tensor queries, ScalarType type) -> Tensor", &place_queries);
  define<float>(library, "Encoder");
  define<BFloat>(library, "EncoderBFloat16");
}

TORCH_LIBRARY_IMPL(shapeshift_encode, CPU, library) { library.impl("pack", &packed_weight); }

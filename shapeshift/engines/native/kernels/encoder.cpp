// Encoders whose weights are float or bfloat16.

#include "encoder.h"

namespace {

// The outputs of a panel of float, by which the packed weights of one kind of CPU differ from those of another.
int64_t panel() { return kPanel; }

}  // namespace

TORCH_LIBRARY(shapeshift_encode, library) {
  library.def("pack(Tensor weight) -> Tensor");
  library.def("panel() -> int", &panel);
  define<float>(library, "Encoder");
  define<BFloat>(library, "EncoderBFloat16");
}

TORCH_LIBRARY_IMPL(shapeshift_encode, CPU, library) { library.impl("pack", &packed_weight); }

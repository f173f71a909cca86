// Encoders whose weights are levels of 8 bits.

#include "encoder.h"

TORCH_LIBRARY_FRAGMENT(shapeshift_encode, library) {
  library.def("pack_levels(Tensor levels) -> Tensor");
  library.def("by_panel(Tensor values) -> Tensor");
  library.def("group() -> int", [] { return kGroup; });
  define<float, Levels<8>>(library, "EncoderLevels8");
  define<BFloat, Levels<8>>(library, "EncoderLevels8BFloat16");
}

TORCH_LIBRARY_IMPL(shapeshift_encode, CPU, library) {
  library.impl("pack_levels", &pack_levels<8>);
  library.impl("by_panel", &by_panel);
}

#include "cuda/emulated.hpp"

namespace unisono::cuda {

Api emulated_api() {
  (void)emulated::Settings(); // throws if one is no number
  Api made;
#define UNISONO_CUDA_EMULATE(name, arguments) made.name = emulated::name;
  UNISONO_CUDA_FUNCTIONS(UNISONO_CUDA_EMULATE)
#undef UNISONO_CUDA_EMULATE
  made.emulated = true;
  return made;
}

} // namespace unisono::cuda

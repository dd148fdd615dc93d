#include "kernels/reduce.hpp"

#include <vector>

namespace unisono {

namespace base {
Kernel find(DType dtype, Op op);
}

#if defined(UNISONO_X86)
namespace avx2 {
Kernel find(DType dtype, Op op);
}
namespace avx512 {
Kernel find(DType dtype, Op op);
}
#endif

namespace {

struct Kernels {
  const char *name;
  Kernel (*find)(DType, Op);
};

// The instruction sets that this machine can run, the fastest first.
std::vector<Kernels> usable() {
  std::vector<Kernels> found;
#if defined(UNISONO_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    found.push_back({"avx512", avx512::find});
  // Every processor with AVX2 converts float16, but a hypervisor may hide that.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
    found.push_back({"avx2", avx2::find});
#endif
  found.push_back({"base", base::find});
  return found;
}

const std::vector<Kernels> &kernels() {
  static const std::vector<Kernels> found = usable();
  return found;
}

} // namespace

Kernel find_kernel(DType dtype, Op op, std::size_t choice) {
  if (choice >= kernels().size())
    return nullptr;
  // GCC 12 makes fused multiply-adds of complex products where the machine has them, even
  // when told not to; their bits would then depend on the machine.
  const bool complex = dtype == DType::complex64 || dtype == DType::complex128;
  if (complex && op == Op::prod)
    return base::find(dtype, op);
  return kernels()[choice].find(dtype, op);
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels &k : kernels())
    names.emplace_back(k.name);
  return names;
}

} // namespace unisono

// The text of the kernel's sources, which a device's compiler reads at run time. CMake puts
// it into the module, so source and binary are always of one version.

#pragma once

#include <span>

namespace unisono::device {

struct SourceFile {
  const char *name; // as it is included: "device/kernel.cu"
  const char *text;
};

std::span<const SourceFile> source_files();

} // namespace unisono::device

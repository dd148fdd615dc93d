// CRC32C, the checksum of data between hosts, by the fastest instructions of the machine.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace unisono {

// The checksum of `bytes` bytes. For data in parts, `seed` is the checksum of the parts
// before; the result is that of the whole.
std::uint32_t crc32c(const void *data, std::size_t bytes, std::uint32_t seed = 0);

// The implementations that this machine can run, the fastest first; all give the same result.
std::vector<std::string> crc32c_ways();
// By one of them, which must exist.
std::uint32_t crc32c_by(std::size_t way, const void *data, std::size_t bytes,
                        std::uint32_t seed = 0);

} // namespace unisono

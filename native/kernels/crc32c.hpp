// CRC32C, the checksum of what travels between hosts, as fast as the machine can.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace unisono {

// The checksum of `bytes` bytes. Data in parts: give the checksum of what came before as
// `seed`, and the result is that of the whole.
std::uint32_t crc32c(const void *data, std::size_t bytes, std::uint32_t seed = 0);

// The ways of computing it that this machine has, the best first; all give the same.
std::vector<std::string> crc32c_ways();
// By one of them; the way must be there.
std::uint32_t crc32c_by(std::size_t way, const void *data, std::size_t bytes,
                        std::uint32_t seed = 0);

} // namespace unisono

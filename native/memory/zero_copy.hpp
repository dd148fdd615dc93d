// Buffers that the ranks of a communicator let each other use in place.
//
// What lies in shared segments anybody can address. Private memory is reached through the
// kernel, if every rank can reach every other's: each tries it once, on a word that all have
// for that, and says how it went.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "memory/host_peers.hpp"
#include "memory/layout.hpp"

namespace unisono {

class Lending {
public:
  Lending(std::shared_ptr<Mesh> mesh, const Layout &layout, std::vector<std::size_t> ranks,
          std::vector<std::size_t> here, std::size_t rank, std::uint64_t id);
  Lending(const Lending &) = delete; // others know the address of its probe
  Lending &operator=(const Lending &) = delete;

  // Whether all ranks can reach each other's private memory; tries it if need be.
  enum Reaching : std::uint64_t { untried, reaches, denied };
  Reaching reach();
  Reaching tried() const { return reach_; }
  // Whether the kernel can get at this buffer of ours; remembers the last that it could.
  bool reachable(const std::byte *data, std::size_t bytes, bool for_writing);

  // While a rank writes to others' buffers it says so, unless somebody has given up.
  class Touch {
  public:
    Touch(const Lending &lending, bool really);
    ~Touch();
    Touch(const Touch &) = delete;
    Touch &operator=(const Touch &) = delete;
    bool allowed() const { return allowed_; }

  private:
    Word *touching_ = nullptr;
    bool allowed_ = true;
  };
  // For one who gives a call up, and has broken the communicator: waits until nobody is
  // writing any more, but no longer than a second. After that `touched` is still true if
  // a rank was stopped in the middle of it.
  void hands_off() const;
  bool touched() const;

  // Memory for a moment, for whoever advances the collectives.
  std::byte *scrap(std::size_t bytes);

private:
  std::shared_ptr<Mesh> mesh_;
  Layout layout_;
  std::vector<std::size_t> ranks_, here_; // of all, those that share memory
  std::size_t rank_;
  std::uint64_t probe_;
  Reaching reach_ = untried;
  std::vector<std::pair<const std::byte *, std::size_t>> reachable_;
  std::vector<std::byte> scrap_;
};

} // namespace unisono

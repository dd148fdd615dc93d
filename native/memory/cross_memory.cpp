#include "memory/cross_memory.hpp"

#include <cerrno>
#include <cstring>

#include <sys/uio.h>
#include <unistd.h>

#include "support/failpoint.hpp"

namespace unisono {

namespace {

using Move = ssize_t (*)(pid_t, const iovec *, unsigned long, const iovec *, unsigned long,
                         unsigned long);

bool move(Move call, int pid, std::byte *here, std::byte *there, std::size_t bytes) {
  while (bytes > 0) {
    const iovec local{here, bytes}, remote{there, bytes};
    const ssize_t done = call(pid, &local, 1, &remote, 1, 0);
    if (done <= 0) {
      if (done < 0 && errno == EINTR)
        continue;
      return false;
    }
    here += done;
    there += done;
    bytes -= std::size_t(done);
  }
  return true;
}

} // namespace

bool copy_from_peer(std::byte *to, PeerAddress from, std::size_t bytes) {
  if (from.pid != 0)
    return move(::process_vm_readv, from.pid, to, from.at, bytes);
  std::memcpy(to, from.at, bytes);
  return true;
}

bool copy_to_peer(PeerAddress to, const std::byte *from, std::size_t bytes) {
  failpoint("reach.write");
  if (to.pid != 0)
    return move(::process_vm_writev, to.pid, const_cast<std::byte *>(from), to.at, bytes);
  std::memcpy(to.at, from, bytes);
  return true;
}

bool accessible(std::byte *data, std::size_t bytes, bool for_writing) {
  if (bytes == 0)
    return true;
  std::byte ends[2];
  const iovec here[2] = {{&ends[0], 1}, {&ends[1], 1}};
  const iovec there[2] = {{data, 1}, {data + bytes - 1, 1}};
  const int self = ::getpid();
  return ::process_vm_readv(self, here, 2, there, 2, 0) == 2 &&
         (!for_writing || ::process_vm_writev(self, here, 2, there, 2, 0) == 2);
}

} // namespace unisono

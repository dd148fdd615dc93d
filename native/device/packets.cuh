// Small calls: every 4 bytes of data travel with a flag of 4 bytes, in one word that is
// stored and loaded at once. So a reader sees by the data themselves that they are there:
// nobody publishes progress, no store waits for another one, and the threads of a block go
// through the program without a barrier. The data take twice the memory.
//
// What others read is always in windows, one for each block, so the program is that which
// exposes nothing. Its chunks are divided between groups of threads, and 16 bytes of a chunk
// (a unit) are always the work of the same thread: what an action writes, a later one of that
// chunk can read. Between chunks, and between ranks, only packets are read.
//
// The flag is the generation, so a window has never seen it before; but it has 32 bits. See
// Interpreter::clear_packets.

#pragma once

#include "device/waits.cuh"

namespace unisono::device {

// How the threads of a block divide the work of a call with packets: the last ones look after
// the arrival of ranks, and groups of the others have some of the chunks each.
struct PacketThreads {
  std::int32_t data, group; // threads: of all groups, of one
  std::int32_t first_control;

  // For so many units of a chunk.
  UNISONO_DEVICE PacketThreads(std::int32_t threads, std::int32_t warp, std::int32_t units)
      : data(threads), group(threads), first_control(0) {
    if (threads <= warp)
      return;
    first_control = threads - warp;
    data = largest_below(warp, first_control);
    group = warp;
    UNISONO_NO_UNROLL
    while (group < units && group < data)
      group *= 2;
  }

private:
  UNISONO_DEVICE static std::int32_t largest_below(std::int32_t begin, std::int32_t limit) {
    UNISONO_NO_UNROLL
    while (2 * begin <= limit)
      begin *= 2;
    return begin;
  }
};

// One thread's part of a call. `Memory` is what the threads of the block share: the addresses
// of the buffers and of the blocks' windows, and the program.
template <class Target, class Memory> class Packets {
  using Vector = typename Target::Vector;
  static constexpr std::int32_t unit_bytes = sizeof(Vector);
  static constexpr std::int32_t packet_words = 4; // of a unit, with their flags
  struct Unit {
    U64 words[packet_words];
  };
  struct Halves {
    U64 low, high;
  };
  struct Parts {
    std::uint32_t of[packet_words];
  };

public:
  UNISONO_DEVICE Packets(const Launch &call, const Target &target, Waits<Target> &waits,
                         const Memory &shared)
      : call_(call), target_(target), waits_(waits), shared_(shared),
        threads_(target.threads(), Target::warp, tile() / unit_bytes) {}

  // The first of the threads that look after the arrival of the ranks.
  UNISONO_DEVICE std::int32_t first_control() const { return threads_.first_control; }

  // The actions of this thread's group; false if the call is given up.
  template <class Operations> UNISONO_DEVICE bool exchange() {
    if (target_.thread() >= threads_.data)
      return true;
    const std::int32_t mine = target_.thread() / threads_.group;
    const std::int32_t groups = threads_.data / threads_.group;
    const std::int32_t first = target_.thread() % threads_.group * unit_bytes;
    UNISONO_NO_UNROLL
    for (std::int32_t a = 0; a < shared_.program.num_actions; ++a) {
      const Action &action = shared_.template rows<Action>(shared_.program, 0)[a];
      if ((action.chunk & (groups - 1)) != mine)
        continue;
      const std::int32_t bytes = std::int32_t(action.size) * std::int32_t(call_.itemsize);
      const std::int32_t left = bytes - target_.block() * tile();
      const std::int32_t end = left < tile() ? left : tile();
      UNISONO_NO_UNROLL
      for (std::int32_t at = first; at < end; at += threads_.group * unit_bytes)
        if (!move<Operations>(action, at, end - at < unit_bytes ? end - at : unit_bytes))
          return false;
    }
    return true;
  }

  // Tells the other ranks which call this is: by one thread.
  UNISONO_DEVICE void announce() const {
    Unit unit;
    set(unit, about());
    target_.store_packets(announcement(call_.rank), unit.words);
  }

  // Waits until a rank makes this call; false if it makes another one, or the call is given up.
  // Announcements are not read before packets are known to be clear. What is there in any case
  // is the rank's arrival, which tells more.
  UNISONO_DEVICE bool sees(std::int32_t rank, U64 call, bool by_announcement) {
    const Arrival &arrival =
        shared_.words[rank]->blocks[target_.block()].arrivals[call & 1];
    UNISONO_NO_UNROLL
    for (unsigned looks = 1;; ++looks) {
      bool by_arrival = !by_announcement;
      if (by_announcement) {
        Unit unit;
        target_.load_packets(announcement(rank), unit.words);
        by_arrival = is_complete(unit);
        if (by_arrival && same(data_of(unit), about()))
          return true;
      }
      if (by_arrival || looks % Target::looks_per_check == 0) {
        if (target_.load_acquire(&arrival.call) == call)
          return waits_.agrees(arrival, arrival.facts.fingerprint, arrival.facts.flags, rank);
        if (looks % Target::looks_per_check == 0 && !waits_.goes_on(rank))
          return false;
      }
      target_.pause(looks);
    }
  }

private:
  UNISONO_DEVICE Vector about() const {
    return bit_cast<Vector>(Halves{call_.fingerprint, waits_.own_flags()});
  }
  UNISONO_DEVICE static bool same(const Vector &one, const Vector &other) {
    const Halves a = bit_cast<Halves>(one), b = bit_cast<Halves>(other);
    return a.low == b.low && a.high == b.high;
  }
  UNISONO_DEVICE U64 *announcement(std::int32_t rank) const {
    return reinterpret_cast<U64 *>(shared_.buffers[rows::window][rank] - packet_header);
  }

  // Bytes of a chunk that are this block's.
  UNISONO_DEVICE std::int32_t tile() const {
    return std::int32_t(shared_.program.tile) * std::int32_t(call_.itemsize);
  }

  UNISONO_DEVICE U64 flag() const { return (shared_.first_generation + 1) << 32; }

  // The unit at byte `at` of this block's part of the chunk, which has so many bytes. Sources
  // are combined in their order, and several are loaded at a time. At most one of them is in a
  // buffer of this rank.
  template <class Operations>
  UNISONO_DEVICE bool move(const Action &action, std::int32_t at, std::int32_t bytes) {
    using Pack = typename Operations::template Pack<Vector>;
    constexpr int together = Pack::registers > 8 ? 1 : Target::packets_together;
    const Place *places =
        shared_.template rows<Place>(shared_.program, shared_.program.places) +
        action.first_place;
    Vector own{};
    if (action.own_source >= 0)
      own = load(buffer_of(places[action.own_source], at), bytes);
    Pack total;
    Vector value{};
    UNISONO_NO_UNROLL
    for (std::int32_t s = 0; s < action.num_sources; s += together) {
      Unit several[together];
      if (!read<together>(action, places, s, at, several))
        return false;
      UNISONO_UNROLL
      for (int i = 0; i < together; ++i) {
        value = s + i == action.own_source ? own : data_of(several[i]);
        if (s + i == 0)
          total.begin(value);
        else if (i == 0 || s + i < action.num_sources)
          total.combine(value);
        if (action.num_sources == 1)
          break; // it is copied as it is
      }
    }
    if (action.num_sources > 1) {
      total.finish(action.completes ? call_.divisor : 1);
      value = total.made();
    }
    places += action.num_sources;
    UNISONO_NO_UNROLL
    for (std::int32_t d = 0; d < action.num_destinations; ++d)
      write(places[d], at, bytes, value);
    return true;
  }

  // Loads some sources until they are complete; false if the call is given up.
  template <int together>
  UNISONO_DEVICE bool read(const Action &action, const Place *places, std::int32_t first,
                           std::int32_t at, Unit (&several)[together]) {
    UNISONO_NO_UNROLL
    for (unsigned looks = 0;; ++looks) {
      UNISONO_UNROLL
      for (int i = 0; i < together; ++i) {
        const std::int32_t s = first + i;
        if (s == action.own_source || s >= action.num_sources)
          set(several[i], Vector{});
        else
          target_.load_packets(packets_of(places[s], at), several[i].words);
      }
      std::int32_t missing = -1;
      UNISONO_UNROLL
      for (int i = 0; i < together; ++i)
        if (!is_complete(several[i]))
          missing = first + i;
      if (missing < 0)
        return true;
      if (looks % Target::looks_per_check == Target::looks_per_check - 1 &&
          !waits_.goes_on(rank_of(places[missing])))
        return false;
      target_.pause(looks);
    }
  }

  // Where the packets of a unit are, of this call and block.
  UNISONO_DEVICE U64 *packets_of(const Place &place, std::int32_t at) const {
    return reinterpret_cast<U64 *>(shared_.buffers[rows::window][rank_of(place)] +
                                   2 * (std::int32_t(place.at) * tile() + at));
  }

  UNISONO_DEVICE std::int32_t rank_of(const Place &place) const {
    return place.rank < 0 ? call_.rank : place.rank;
  }

  // Where a unit is in a buffer of this rank.
  UNISONO_DEVICE unsigned char *buffer_of(const Place &place, std::int32_t at) const {
    return shared_.buffers[place.home][call_.rank] +
           place.at * std::int64_t(call_.itemsize) + target_.block() * tile() + at;
  }

  UNISONO_DEVICE void write(const Place &place, std::int32_t at, std::int32_t bytes,
                            const Vector &value) const {
    if (place.home != rows::window)
      return store(buffer_of(place, at), bytes, value);
    Unit unit;
    set(unit, value);
    target_.store_packets(packets_of(place, at), unit.words);
  }

  UNISONO_DEVICE void set(Unit &unit, const Vector &value) const {
    const Parts parts = bit_cast<Parts>(value);
    UNISONO_UNROLL
    for (int k = 0; k < packet_words; ++k)
      unit.words[k] = flag() | parts.of[k];
  }

  UNISONO_DEVICE static Vector data_of(const Unit &unit) {
    Parts parts;
    UNISONO_UNROLL
    for (int k = 0; k < packet_words; ++k)
      parts.of[k] = std::uint32_t(unit.words[k]);
    return bit_cast<Vector>(parts);
  }

  UNISONO_DEVICE bool is_complete(const Unit &unit) const {
    U64 different = 0;
    UNISONO_UNROLL
    for (int k = 0; k < packet_words; ++k)
      different |= unit.words[k] ^ flag();
    return different >> 32 == 0;
  }

  // Of a buffer, where a unit need not be whole, nor aligned.
  UNISONO_DEVICE static Vector load(const unsigned char *from, std::int32_t bytes) {
    if ((reinterpret_cast<U64>(from) | U64(bytes)) % unit_bytes == 0)
      return *reinterpret_cast<const Vector *>(from);
    if ((reinterpret_cast<U64>(from) | U64(bytes)) % 4 == 0) {
      Parts parts;
      UNISONO_UNROLL
      for (int k = 0; k < packet_words; ++k) {
        parts.of[k] = 0;
        if (4 * k < bytes)
          parts.of[k] = reinterpret_cast<const std::uint32_t *>(from)[k];
      }
      return bit_cast<Vector>(parts);
    }
    Halves halves{};
    UNISONO_NO_UNROLL
    for (std::int32_t b = 0; b < bytes; ++b) {
      const U64 byte = U64(from[b]) << 8 * (b % 8);
      halves.low |= b < 8 ? byte : 0;
      halves.high |= b < 8 ? 0 : byte;
    }
    return bit_cast<Vector>(halves);
  }

  UNISONO_DEVICE static void store(unsigned char *to, std::int32_t bytes, const Vector &value) {
    if ((reinterpret_cast<U64>(to) | U64(bytes)) % unit_bytes == 0) {
      *reinterpret_cast<Vector *>(to) = value;
      return;
    }
    if ((reinterpret_cast<U64>(to) | U64(bytes)) % 4 == 0) {
      const Parts parts = bit_cast<Parts>(value);
      UNISONO_UNROLL
      for (int k = 0; k < packet_words; ++k)
        if (4 * k < bytes)
          reinterpret_cast<std::uint32_t *>(to)[k] = parts.of[k];
      return;
    }
    const Halves halves = bit_cast<Halves>(value);
    UNISONO_NO_UNROLL
    for (std::int32_t b = 0; b < bytes; ++b)
      to[b] = static_cast<unsigned char>((b < 8 ? halves.low : halves.high) >> 8 * (b % 8));
  }

  const Launch &call_;
  const Target target_;
  Waits<Target> &waits_;
  const Memory &shared_;
  const PacketThreads threads_;
};

} // namespace unisono::device

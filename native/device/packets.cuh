// Small calls: data travel with flags (flagged.cuh). So a reader sees by the data themselves
// that they are there: nobody publishes progress, no store waits for another one, and the
// threads of a block go through the program without a barrier. The data take twice the memory.
//
// What others read is always in windows, one for each block, so the program is that which
// exposes nothing. Its chunks are divided between groups of threads, and 16 bytes of a chunk
// (a unit) are always the work of the same thread: what an action writes, a later one of that
// chunk can read. Between chunks, and between ranks, only packets are read.
//
// The flag is the generation, of which 31 bits are kept; the highest bit is always set, because
// packets that were cleared have the flag 0. So a window has not seen a flag before, unless
// 2^31 generations ago. See Interpreter::clear_packets.

#pragma once

#include "device/waits.cuh"

namespace unisono::device {

// How the threads of a block divide the work of a call with packets: the last ones look after
// the arrival of ranks, and groups of the others have some of the chunks each. The numbers of
// threads are powers of 2.
struct PacketThreads {
  std::int32_t data_bits, group_bits; // threads of all groups, of one
  std::int32_t first_control;

  // For so many units of a chunk.
  template <class Target>
  UNISONO_DEVICE static PacketThreads of(const Target &target, std::int32_t units) {
    const std::int32_t others =
        target.threads() > Target::warp ? target.threads() - Target::warp : 0;
    const std::int32_t data =
        Target::bit_width(unsigned(others > 0 ? others : target.threads())) - 1;
    const std::int32_t whole = Target::bit_width(unsigned(units - 1));
    constexpr std::int32_t least = Target::warp_bits;
    const std::int32_t group = whole < least ? least : whole;
    return {data, group < data ? group : data, others};
  }
};

// A pack whose sums are kept as they are stored, between one source and the next: elements of
// 8 bits take a fourth of the registers.
template <class Pack> struct StoredSums {
  using Unit = typename Pack::Unit;
  Unit sums;

  UNISONO_DEVICE void begin(const Unit &first) { sums = first; }
  UNISONO_DEVICE void combine(const Unit &next) {
    Pack pack = unpacked();
    pack.combine(next);
    sums = pack.made();
  }
  UNISONO_DEVICE void finish(std::uint32_t divisor) {
    Pack pack = unpacked();
    pack.finish(divisor);
    sums = pack.made();
  }
  UNISONO_DEVICE Unit made() const { return sums; }

private:
  UNISONO_DEVICE Pack unpacked() const {
    Pack pack;
    pack.begin(sums);
    return pack;
  }
};

// One thread's part of a call. `Memory` is what the threads of the block share: the addresses
// of the buffers and of the blocks' windows, and the program.
template <class Target, class Memory> class Packets {
  using Vector = typename Target::Vector;
  static constexpr std::int32_t unit_bytes = sizeof(Vector);
  using Unit = Flagged<Target>;
  struct Halves {
    U64 low, high;
  };

public:
  UNISONO_DEVICE Packets(const Launch &call, const Target &target, Waits<Target> &waits,
                         const Memory &shared)
      : call_(call), target_(target), waits_(waits), shared_(shared) {}

  // The actions of this thread's group; false if the call is given up. What the threads share
  // is read anew for each unit, which saves registers.
  template <class Operations> UNISONO_DEVICE bool exchange() {
    if (group() >= groups())
      return true;
    UNISONO_NO_UNROLL
    for (std::int32_t a = 0; a < shared_.program.num_actions; ++a) {
      const Action &action = shared_.template rows<Action>(shared_.program, 0)[a];
      if ((action.chunk & (groups() - 1)) != group())
        continue;
      UNISONO_NO_UNROLL
      for (std::int32_t at = in_group() * unit_bytes; at < end_of(action);
           at += unit_bytes << shared_.threads.group_bits)
        if (!move<Operations>(action, at))
          return false;
    }
    return true;
  }

private:
  UNISONO_DEVICE std::int32_t group() const {
    return target_.thread() >> shared_.threads.group_bits;
  }
  UNISONO_DEVICE std::int32_t in_group() const {
    return target_.thread() & ((1 << shared_.threads.group_bits) - 1);
  }
  UNISONO_DEVICE std::int32_t groups() const {
    return 1 << (shared_.threads.data_bits - shared_.threads.group_bits);
  }

  // Of this block's part of the chunk of an action, in bytes.
  UNISONO_DEVICE std::int32_t end_of(const Action &action) const {
    const std::int32_t left = std::int32_t(action.size) - target_.block() * tile();
    return left < tile() ? left : tile();
  }

  // Bytes of the unit that begins there.
  UNISONO_DEVICE std::int32_t left_of(const Action &action, std::int32_t at) const {
    const std::int32_t left = end_of(action) - at;
    return left < unit_bytes ? left : unit_bytes;
  }

  // Bytes of a chunk that are this block's.
  UNISONO_DEVICE std::int32_t tile() const { return shared_.program.tile; }

  UNISONO_DEVICE U64 flag() const {
    return flag_of((shared_.first_generation + 1) | U64(1) << 31);
  }

  // The unit at byte `at` of this block's part of the chunk. At most one of its sources is in a
  // buffer of this rank.
  template <class Operations>
  UNISONO_DEVICE bool move(const Action &action, std::int32_t at) {
    const Place *places =
        shared_.template rows<Place>(shared_.program, shared_.program.places) +
        action.first_place;
    Vector value{};
    if (action.own_source >= 0)
      value = load(buffer_of(places[action.own_source], at), left_of(action, at));
    if ((action.num_sources != 1 || action.own_source < 0) &&
        !combine<Operations>(action, places, at, value))
      return false;
    places += action.num_sources;
    UNISONO_NO_UNROLL
    for (std::int32_t d = 0; d < action.num_destinations; ++d)
      write(places[d], at, left_of(action, at), value);
    return true;
  }

  // The sources of a unit, if they are more than one in a buffer of this rank, whose value is
  // given. Where registers are few, one part of the unit is done after the other.
  template <class Operations>
  UNISONO_DEVICE bool combine(const Action &action, const Place *places, std::int32_t at,
                              Vector &value) {
    using Whole = typename Operations::template Pack<Vector>;
    constexpr bool is_narrow = Whole::registers > Target::packet_registers;
    constexpr bool is_stored = is_narrow && Whole::is_exact;
    constexpr int parts = !is_stored && Whole::registers > Target::packet_sums ? 2 : 1;
    struct Part {
      std::uint32_t of[flagged_words / parts];
    };
    struct Parts {
      Part of[parts];
    };
    using Pack = typename Operations::template Pack<Part>;
    using Sums = std::conditional_t<is_stored, StoredSums<Pack>, Pack>;
    Parts made = bit_cast<Parts>(value);
    UNISONO_UNROLL
    for (int part = 0; part < parts; ++part) {
      Sums total{};
      UNISONO_NO_UNROLL
      for (std::int32_t s = 0; s < action.num_sources;) {
        constexpr int together = is_narrow ? 1 : Target::packets_together;
        Unit several[together];
        if (!read<together>(action, places, s, at, several))
          return false;
        UNISONO_UNROLL
        for (int i = 0; i < together; ++i, ++s) {
          const Part next = s == action.own_source
                                ? bit_cast<Parts>(value).of[part]
                                : bit_cast<Parts>(several[i].data()).of[part];
          if (s == 0)
            total.begin(made.of[part] = next); // one alone is copied as it is
          else if (s < action.num_sources)
            total.combine(next);
        }
      }
      if (action.num_sources > 1) {
        total.finish(action.completes ? call_.divisor : 1);
        made.of[part] = total.made();
      }
    }
    value = bit_cast<Vector>(made);
    return true;
  }

  // Loads some sources until they are complete, in their order; false if the call is given up.
  template <int together>
  UNISONO_DEVICE bool read(const Action &action, const Place *places, std::int32_t first,
                           std::int32_t at, Unit (&several)[together]) {
    UNISONO_NO_UNROLL
    for (unsigned looks = 0;; ++looks) {
      UNISONO_UNROLL
      for (int i = 0; i < together; ++i) {
        const std::int32_t s = first + i;
        if (s == action.own_source || s >= action.num_sources)
          several[i].set(Vector{}, flag());
        else
          target_.load_packets(packets_of(places[s], at), several[i].words);
      }
      std::int32_t missing = -1;
      UNISONO_UNROLL
      for (int i = 0; i < together; ++i)
        if (several[i].difference(flag()) != 0)
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
    return shared_.buffers[place.home][call_.rank] + place.at + target_.block() * tile() + at;
  }

  UNISONO_DEVICE void write(const Place &place, std::int32_t at, std::int32_t bytes,
                            const Vector &value) const {
    if (place.home != rows::window)
      return store(buffer_of(place, at), bytes, value);
    Unit unit;
    unit.set(value, flag());
    target_.store_packets(packets_of(place, at), unit.words);
  }

  // Of a buffer, where a unit need not be whole, nor aligned.
  UNISONO_DEVICE static Vector load(const unsigned char *from, std::int32_t bytes) {
    UNISONO_ASSUME_GLOBAL(from);
    if ((reinterpret_cast<U64>(from) | U64(bytes)) % unit_bytes == 0)
      return *reinterpret_cast<const Vector *>(from);
    if ((reinterpret_cast<U64>(from) | U64(bytes)) % 4 == 0) {
      typename Unit::Parts parts;
      UNISONO_UNROLL
      for (int k = 0; k < flagged_words; ++k) {
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
    UNISONO_ASSUME_GLOBAL(to);
    if ((reinterpret_cast<U64>(to) | U64(bytes)) % unit_bytes == 0) {
      *reinterpret_cast<Vector *>(to) = value;
      return;
    }
    if ((reinterpret_cast<U64>(to) | U64(bytes)) % 4 == 0) {
      const auto parts = bit_cast<typename Unit::Parts>(value);
      UNISONO_UNROLL
      for (int k = 0; k < flagged_words; ++k)
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
};

} // namespace unisono::device

#include "idmap.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <random>

namespace asyncckpt {
namespace {

constexpr uint64_t slots_min = 16;
constexpr uint64_t ids_max = uint64_t{1} << 48;
// How many ids ahead a slot is fetched: about one cache miss divided by the time of one probe that hits.
constexpr uint64_t prefetch_distance = 32;
// Room is made for this many ids at a time, so a batch of known ids does not grow the map by its own size.
constexpr uint64_t chunk_ids = 4096;
constexpr uint64_t bits = 64;

uint64_t random_key() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

// The smallest power of two that is at most 5/8 full with `ids` ids; fuller tables have long runs to probe.
uint64_t slots_for(uint64_t ids) {
  if (ids > ids_max) throw std::bad_alloc();
  return std::max(slots_min, std::bit_ceil(ids + ids * 3 / 5));
}

}  // namespace

IdMap::IdMap(uint64_t capacity) : key_(random_key()) {
  slots_.reserve(slots_min);
  mask_ = slots_min - 1;
  reserve(capacity);
}

// The finalizer of MurmurHash3: every bit of the id moves every bit of the slot number. It can be inverted, so without
// the key anybody could choose ids that all have one home.
uint64_t IdMap::hash_of(int64_t id) const {
  uint64_t hash = static_cast<uint64_t>(id) ^ key_;
  hash = (hash ^ (hash >> 33)) * 0xff51afd7ed558ccdULL;
  hash = (hash ^ (hash >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return hash ^ (hash >> 33);
}

// Call visit(index, home slot) for every id, with the home slots of the next ids on their way into the cache.
template <class Visit>
void IdMap::for_each_prefetched(const int64_t* ids, uint64_t count, Visit&& visit) const {
  uint64_t homes[prefetch_distance];
  const auto fetch = [&](uint64_t index) {
    const uint64_t home = hash_of(ids[index]) & mask_;
    __builtin_prefetch(slots() + home);
    homes[index % prefetch_distance] = home;
  };
  for (uint64_t index = 0; index < std::min(count, prefetch_distance); ++index) fetch(index);
  for (uint64_t index = 0; index < count; ++index) {
    const uint64_t home = homes[index % prefetch_distance];
    if (index + prefetch_distance < count) fetch(index + prefetch_distance);
    visit(index, home);
  }
}

// The slot that holds `id`, else the empty slot where it belongs.
uint64_t IdMap::probe(int64_t id, uint64_t home) const {
  const Slot* table = slots();
  uint64_t position = home;
  while (table[position].row_plus_one != 0 && table[position].id != id) position = (position + 1) & mask_;
  return position;
}

void IdMap::find(const int64_t* ids, uint64_t count, int64_t* rows) const {
  for_each_prefetched(ids, count, [&](uint64_t index, uint64_t home) {
    // An empty slot gives row 0 - 1.
    rows[index] = static_cast<int64_t>(slots()[probe(ids[index], home)].row_plus_one) - 1;
  });
}

uint64_t IdMap::insert(const int64_t* ids, uint64_t count, int64_t* rows, int64_t* new_rows) {
  const uint64_t rows_end_before = rows_end_;
  std::vector<int64_t> added;
  try {
    for (uint64_t begin = 0; begin < count; begin += chunk_ids) {
      const uint64_t chunk = std::min(chunk_ids, count - begin);
      make_room(chunk);
      if (added.capacity() < added.size() + chunk) added.reserve(std::max(added.size() + chunk, 2 * added.capacity()));
      insert_chunk(ids + begin, chunk, rows + begin, added);
    }
  } catch (...) {
    undo_insert(added, rows_end_before);
    throw;
  }
  if (new_rows != nullptr) std::copy(added.begin(), added.end(), new_rows);
  return added.size();
}

// There is room for all of them, so nothing moves and nothing fails.
void IdMap::insert_chunk(const int64_t* ids, uint64_t count, int64_t* rows, std::vector<int64_t>& new_rows) {
  for_each_prefetched(ids, count, [&](uint64_t index, uint64_t home) {
    Slot& slot = slots()[probe(ids[index], home)];
    if (slot.row_plus_one == 0) {
      const uint64_t row = take_row();
      slot = {ids[index], row + 1};
      ids_.data()[row] = ids[index];
      new_rows.push_back(static_cast<int64_t>(row));
    }
    rows[index] = static_cast<int64_t>(slot.row_plus_one) - 1;
  });
}

// In reverse, so that the stack of free rows comes back in its old order.
void IdMap::undo_insert(const std::vector<int64_t>& new_rows, uint64_t rows_end_before) {
  for (uint64_t index = new_rows.size(); index-- > 0;) {
    const uint64_t row = static_cast<uint64_t>(new_rows[index]);
    erase_slot(probe(ids_.data()[row], hash_of(ids_.data()[row]) & mask_));
    used_.data()[row / bits] &= ~(uint64_t{1} << row % bits);
    // Taking a row left its place in the vector's storage, so this does not allocate.
    if (row < rows_end_before) free_rows_.push_back(new_rows[index]);
  }
  size_ -= new_rows.size();
  rows_end_ = rows_end_before;
}

void IdMap::remove(const int64_t* ids, uint64_t count, int64_t* rows) {
  const uint64_t needed = free_rows_.size() + count;
  if (free_rows_.capacity() < needed) free_rows_.reserve(std::max(needed, 2 * free_rows_.capacity()));
  for_each_prefetched(ids, count, [&](uint64_t index, uint64_t home) {
    const uint64_t position = probe(ids[index], home);
    rows[index] = static_cast<int64_t>(slots()[position].row_plus_one) - 1;
    if (rows[index] < 0) return;
    const uint64_t row = static_cast<uint64_t>(rows[index]);
    erase_slot(position);
    used_.data()[row / bits] &= ~(uint64_t{1} << row % bits);
    free_rows_.push_back(rows[index]);
    --size_;
  });
}

// Close the hole by moving back every later slot of the run that may lie there, so no tombstones slow down later probes.
void IdMap::erase_slot(uint64_t position) {
  Slot* table = slots();
  uint64_t hole = position;
  for (uint64_t next = (hole + 1) & mask_; table[next].row_plus_one != 0; next = (next + 1) & mask_) {
    const uint64_t home = hash_of(table[next].id) & mask_;
    if (((next - home) & mask_) < ((next - hole) & mask_)) continue;  // The hole lies before its home.
    table[hole] = table[next];
    hole = next;
  }
  table[hole] = Slot{};
}

uint64_t IdMap::take_row() {
  uint64_t row = rows_end_;
  if (free_rows_.empty()) {
    ++rows_end_;
  } else {
    row = static_cast<uint64_t>(free_rows_.back());
    free_rows_.pop_back();
  }
  used_.data()[row / bits] |= uint64_t{1} << row % bits;
  ++size_;
  return row;
}

void IdMap::reserve(uint64_t capacity) {
  if (slots_for(capacity) > mask_ + 1) rehash(slots_for(capacity));
  ids_.reserve(capacity);
  used_.reserve(capacity / bits + 1);
}

void IdMap::make_room(uint64_t more_ids) {
  if (slots_for(size_ + more_ids) > mask_ + 1) rehash(slots_for(size_ + more_ids));
  const uint64_t fresh = more_ids > free_rows_.size() ? more_ids - free_rows_.size() : 0;
  const uint64_t rows = rows_end_ + fresh;
  if (rows <= ids_.room() && rows / bits < used_.room()) return;
  ids_.reserve(std::max(rows, 2 * ids_.room()));
  used_.reserve(std::max(rows / bits + 1, 2 * used_.room()));
}

void IdMap::rehash(uint64_t slots_count) {
  Column<Slot> wider;
  wider.reserve(slots_count);
  const Slot* old = slots();
  const uint64_t old_count = mask_ + 1;
  Slot* table = wider.data();
  const uint64_t mask = slots_count - 1;
  for (uint64_t index = 0; index < old_count; ++index) {
    if (old[index].row_plus_one == 0) continue;
    uint64_t position = hash_of(old[index].id) & mask;
    while (table[position].row_plus_one != 0) position = (position + 1) & mask;
    table[position] = old[index];
  }
  slots_ = std::move(wider);
  mask_ = mask;
}

uint64_t IdMap::runs(int64_t* ranges, uint64_t room) const {
  const uint64_t* words = used_.data();
  uint64_t count = 0;
  bool inside = false;
  // Each turn of the bits, from free to used or back, is one end of a range.
  const auto turn = [&](uint64_t row) {
    if (count < room) ranges[2 * count + inside] = static_cast<int64_t>(row);
    count += inside;
    inside = !inside;
  };
  for (uint64_t base = 0; base < rows_end_; base += bits) {
    uint64_t pending = inside ? ~words[base / bits] : words[base / bits];
    while (pending != 0) {
      const int bit = std::countr_zero(pending);
      turn(base + static_cast<uint64_t>(bit));
      // Look for the opposite from here on.
      pending = ~pending & (~uint64_t{0} << bit);
    }
  }
  if (inside) turn(rows_end_);
  return count;
}

uint64_t IdMap::longest_run() const {
  uint64_t longest = 0, run = 0;
  for (uint64_t position = 0; position <= mask_; ++position) {
    run = slots()[position].row_plus_one != 0 ? run + 1 : 0;
    longest = std::max(longest, run);
  }
  return longest;
}

void IdMap::clear() {
  std::memset(static_cast<void*>(slots()), 0, (mask_ + 1) * sizeof(Slot));
  if (rows_end_ > 0) std::memset(used_.data(), 0, ((rows_end_ - 1) / bits + 1) * sizeof(uint64_t));
  free_rows_.clear();
  size_ = rows_end_ = 0;
}

}  // namespace asyncckpt

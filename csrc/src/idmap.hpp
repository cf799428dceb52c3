// int64 id -> row, in memory that one thread at a time uses.
//
// Two tables that always agree:
//   slots_   open addressing with linear probing; a slot is (id, row + 1), and zero-filled memory is empty slots.
//   ids_     the id of every row, with one bit per row that says whether it is used.
// Rows are given out in a fixed order (the row freed last, else the next one never used), so the same calls give the
// same rows everywhere. A probe costs one cache miss; batches hide it by fetching slots some ids ahead.
#pragma once

#include <cstdint>
#include <vector>

#include "mapping.hpp"

namespace asyncckpt {

class IdMap {
 public:
  explicit IdMap(uint64_t capacity);

  uint64_t size() const { return size_; }
  uint64_t rows_end() const { return rows_end_; }
  const int64_t* ids() const { return ids_.data(); }
  uint64_t bytes() const {
    return slots_.bytes() + ids_.bytes() + used_.bytes() + free_rows_.capacity() * sizeof(int64_t);
  }

  // Throw std::bad_alloc or Error, and then leave the map as it was.
  void reserve(uint64_t capacity);
  uint64_t insert(const int64_t* ids, uint64_t count, int64_t* rows, int64_t* new_rows);
  void remove(const int64_t* ids, uint64_t count, int64_t* rows);

  void find(const int64_t* ids, uint64_t count, int64_t* rows) const;
  // Returns how many ranges there are, of which the first `room` are written.
  uint64_t runs(int64_t* ranges, uint64_t room) const;
  void clear();
  // The most slots in a row that are used, which is what the longest probe takes.
  uint64_t longest_run() const;

 private:
  struct Slot {
    int64_t id;
    uint64_t row_plus_one;
  };

  // A zero-filled array that grows in place.
  template <class Value>
  class Column {
   public:
    Value* data() const { return reinterpret_cast<Value*>(mapping_.data()); }
    uint64_t bytes() const { return mapping_.bytes(); }
    uint64_t room() const { return bytes() / sizeof(Value); }
    void reserve(uint64_t count) {
      if (count > room()) mapping_.grow(count * sizeof(Value));
    }

   private:
    Mapping mapping_;
  };

  uint64_t hash_of(int64_t id) const;
  template <class Visit>
  void for_each_prefetched(const int64_t* ids, uint64_t count, Visit&& visit) const;
  uint64_t probe(int64_t id, uint64_t home) const;
  void insert_chunk(const int64_t* ids, uint64_t count, int64_t* rows, std::vector<int64_t>& new_rows);
  void undo_insert(const std::vector<int64_t>& new_rows, uint64_t rows_end_before);
  uint64_t take_row();
  void erase_slot(uint64_t position);
  void rehash(uint64_t slots_count);
  void make_room(uint64_t more_ids);

  Slot* slots() const { return slots_.data(); }

  const uint64_t key_;  // of the hash, another one in every map
  Column<Slot> slots_;
  uint64_t mask_ = 0;  // slots count - 1
  uint64_t size_ = 0;
  Column<int64_t> ids_;
  Column<uint64_t> used_;  // one bit per row
  uint64_t rows_end_ = 0;
  std::vector<int64_t> free_rows_;
};

}  // namespace asyncckpt

// ac_idmap_*: the id map at the C border.
#include "asyncckpt.h"
#include "error.hpp"
#include "idmap.hpp"
#include "marks.hpp"

struct ac_idmap {
  asyncckpt::IdMap map;
};

namespace {

void require_batch(const ac_idmap* map, const int64_t* ids, uint64_t count, const int64_t* rows) {
  asyncckpt::require(map != nullptr, "map is NULL");
  asyncckpt::require(count == 0 || (ids != nullptr && rows != nullptr), "ids or rows is NULL");
}

}  // namespace

extern "C" {

ac_idmap* ac_idmap_new(uint64_t capacity) {
  ac_idmap* made = nullptr;
  (void)asyncckpt::at_border(nullptr, [&] { made = new ac_idmap{asyncckpt::IdMap(capacity)}; });
  return made;
}

void ac_idmap_free(ac_idmap* map) { delete map; }

uint64_t ac_idmap_size(const ac_idmap* map) { return map->map.size(); }

uint64_t ac_idmap_rows_end(const ac_idmap* map) { return map->map.rows_end(); }

uint64_t ac_idmap_bytes(const ac_idmap* map) { return map->map.bytes(); }

const int64_t* ac_idmap_ids(const ac_idmap* map) { return map->map.ids(); }

int32_t ac_idmap_reserve(ac_idmap* map, uint64_t capacity, ac_error* error) {
  return asyncckpt::at_border(error, [&] {
    asyncckpt::require(map != nullptr, "map is NULL");
    map->map.reserve(capacity);
  });
}

int32_t ac_idmap_find(const ac_idmap* map, const int64_t* ids, uint64_t count, int64_t* rows, ac_error* error) {
  return asyncckpt::at_border(error, [&] {
    require_batch(map, ids, count, rows);
    map->map.find(ids, count, rows);
  });
}

int32_t ac_idmap_insert(ac_idmap* map, const int64_t* ids, uint64_t count, int64_t* rows, int64_t* new_rows,
                        uint64_t* new_count, uint8_t* marks, uint64_t marks_count, uint8_t mark, ac_error* error) {
  return asyncckpt::at_border(error, [&] {
    require_batch(map, ids, count, rows);
    const uint64_t added = map->map.insert(ids, count, rows, new_rows);
    if (marks != nullptr) asyncckpt::mark_used(marks, marks_count, rows, count, mark);
    if (new_count != nullptr) *new_count = added;
  });
}

int32_t ac_idmap_remove(ac_idmap* map, const int64_t* ids, uint64_t count, int64_t* rows, ac_error* error) {
  return asyncckpt::at_border(error, [&] {
    require_batch(map, ids, count, rows);
    map->map.remove(ids, count, rows);
  });
}

int32_t ac_idmap_runs(const ac_idmap* map, int64_t* runs, uint64_t room, uint64_t* count, ac_error* error) {
  return asyncckpt::at_border(error, [&] {
    asyncckpt::require(map != nullptr && count != nullptr, "map or count is NULL");
    asyncckpt::require(room == 0 || runs != nullptr, "runs is NULL");
    *count = map->map.runs(runs, room);
  });
}

void ac_idmap_clear(ac_idmap* map) { map->map.clear(); }

}  // extern "C"

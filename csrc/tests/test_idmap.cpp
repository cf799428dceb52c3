// The id map beside std::unordered_map, and without memory.
#include <cerrno>
#include <random>
#include <unordered_map>
#include <vector>

#include "asyncckpt.h"
#include "check.hpp"
#include "error.hpp"
#include "faults.hpp"
#include "idmap.hpp"

using namespace asyncckpt;

namespace {

using Ids = std::vector<int64_t>;

Ids random_ids(std::mt19937_64& random, size_t count, int64_t spread) {
  std::uniform_int_distribution<int64_t> any(-spread, spread);
  Ids ids(count);
  for (int64_t& id : ids) id = any(random);
  return ids;
}

Ids find(const IdMap& map, const Ids& ids) {
  Ids rows(ids.size());
  map.find(ids.data(), ids.size(), rows.data());
  return rows;
}

Ids runs_of(const IdMap& map) {
  Ids ranges(2 * map.runs(nullptr, 0));
  CHECK(map.runs(ranges.data(), ranges.size() / 2) == ranges.size() / 2);
  return ranges;
}

// The id whose hash without a key is this one: the finalizer of MurmurHash3, backwards.
int64_t unhash(uint64_t hash) {
  hash = (hash ^ (hash >> 33)) * 0x9cb4b2f8129337dbULL;
  hash = (hash ^ (hash >> 33)) * 0x4f74430c22a54005ULL;
  return static_cast<int64_t>(hash ^ (hash >> 33));
}

}  // namespace

TEST(idmap_follows_a_model) {
  std::mt19937_64 random(1);
  IdMap map(0);
  std::unordered_map<int64_t, int64_t> model;
  for (int turn = 0; turn < 300; ++turn) {
    const Ids ids = random_ids(random, random() % 400, 1500);
    Ids rows(ids.size()), new_rows(ids.size());
    const uint64_t added = map.insert(ids.data(), ids.size(), rows.data(), new_rows.data());
    uint64_t expected_added = 0;
    for (size_t index = 0; index < ids.size(); ++index) {
      const auto [place, is_new] = model.try_emplace(ids[index], rows[index]);
      CHECK(place->second == rows[index]);
      if (is_new) CHECK(new_rows[expected_added++] == rows[index]);
    }
    CHECK(added == expected_added && map.size() == model.size());
    const Ids gone = random_ids(random, random() % 400, 1500);
    rows.assign(gone.size(), 0);
    map.remove(gone.data(), gone.size(), rows.data());
    for (size_t index = 0; index < gone.size(); ++index) {
      const auto place = model.find(gone[index]);
      CHECK(rows[index] == (place == model.end() ? -1 : place->second));
      if (place != model.end()) model.erase(place);
    }
  }
  uint64_t covered = 0;
  const Ids ranges = runs_of(map);
  for (size_t index = 0; index < ranges.size(); index += 2) covered += static_cast<uint64_t>(ranges[index + 1] - ranges[index]);
  CHECK(covered == model.size());
  for (const auto& [id, row] : model) CHECK(map.ids()[row] == id && find(map, {id})[0] == row);
}

// A batch that fails in its middle is undone, whichever mapping fails.
TEST(idmap_cannot_be_slowed_down_by_chosen_ids) {
  Ids chosen(4000), rows(chosen.size());
  for (size_t index = 0; index < chosen.size(); ++index) chosen[index] = unhash(uint64_t{index} << 40 | 7);
  for (int turn = 0; turn < 20; ++turn) {
    IdMap map(0);
    map.insert(chosen.data(), chosen.size(), rows.data(), nullptr);
    // A map that is at most 5/8 full has runs of some dozens; of one home they would be one run.
    CHECK(map.longest_run() < 400);
  }
}

TEST(idmap_without_memory_stays_as_it_was) {
  std::mt19937_64 random(2);
  const Ids first = random_ids(random, 5000, 1 << 30), second = random_ids(random, 200'000, 1 << 30);
  for (const Call call : {Call::mmap, Call::mremap}) {
    for (uint64_t failing_call = 0; failing_call < 40; ++failing_call) {
      IdMap map(0);
      Ids rows(second.size());
      map.insert(first.data(), first.size(), rows.data(), nullptr);
      map.remove(first.data(), 1000, rows.data());
      const Ids found = find(map, first), ranges = runs_of(map);
      const uint64_t size = map.size(), rows_end = map.rows_end();
      bool failed = false;
      {
        const Fault fault = Fault::failing(call, ENOMEM, failing_call, 1);
        try {
          map.insert(second.data(), second.size(), rows.data(), nullptr);
        } catch (const Error&) {
          failed = true;
        }
      }
      if (!failed) break;
      CHECK(find(map, first) == found && runs_of(map) == ranges);
      CHECK(map.size() == size && map.rows_end() == rows_end);
      // The free rows come back in the order they would have had.
      IdMap twin(0);
      Ids twin_rows(second.size());
      twin.insert(first.data(), first.size(), twin_rows.data(), nullptr);
      twin.remove(first.data(), 1000, twin_rows.data());
      map.insert(second.data(), second.size(), rows.data(), nullptr);
      twin.insert(second.data(), second.size(), twin_rows.data(), nullptr);
      CHECK(rows == twin_rows);
    }
  }
}

TEST(idmap_reports_no_memory_at_the_border) {
  {
    const Fault fault = Fault::failing(Call::mmap, ENOMEM);
    CHECK(ac_idmap_new(10) == nullptr);
  }
  ac_idmap* map = ac_idmap_new(0);
  ac_error error;
  CHECK(ac_idmap_reserve(map, UINT64_MAX, &error) == AC_NO_MEMORY);
  CHECK(ac_idmap_find(map, nullptr, 1, nullptr, &error) == AC_INVALID);
  CHECK(ac_idmap_find(map, nullptr, 0, nullptr, &error) == AC_OK);
  ac_idmap_free(map);
  ac_idmap_free(nullptr);
}

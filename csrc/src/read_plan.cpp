#include "read_plan.hpp"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace asyncckpt {
namespace {

// Reading over a gap of this size costs less than a second read.
constexpr uint64_t gap_bytes_max = 64 << 10;

std::vector<uint64_t> in_disk_order(const ac_read_item* items, uint64_t count) {
  std::vector<uint64_t> order(count);
  std::iota(order.begin(), order.end(), uint64_t{0});
  const auto place = [items](uint64_t index) {
    const ac_read_item& item = items[index];
    return std::tuple(item.fd, item.direct != 0, item.offset, index);
  };
  const auto before = [&](uint64_t left, uint64_t right) { return place(left) < place(right); };
  if (!std::is_sorted(order.begin(), order.end(), before)) std::sort(order.begin(), order.end(), before);
  return order;
}

class Planner {
 public:
  explicit Planner(uint64_t block_bytes) : block_bytes_(block_bytes) {}

  void add(const ac_read_item& item, uint64_t index) {
    if (item.bytes > block_bytes_) {
      for (uint64_t begin = 0; begin < item.bytes; begin += block_bytes_) {
        start_read(item, {index, begin, std::min(block_bytes_, item.bytes - begin)});
      }
      joinable_ = false;
    } else if (item.bytes > 0) {
      if (!join_last(item, index)) start_read(item, {index, 0, item.bytes});
      joinable_ = true;
    }
  }

  ReadPlan plan;

 private:
  bool join_last(const ac_read_item& item, uint64_t index) {
    if (!joinable_) return false;
    DiskRead& last = plan.reads.back();
    const uint64_t end = std::max(last.end, item.offset + item.bytes);
    const bool same_file = last.fd == item.fd && last.direct == (item.direct != 0);
    if (!same_file || item.offset > last.end + gap_bytes_max || end - last.begin > block_bytes_) return false;
    last.end = end;
    ++last.pieces_count;
    plan.pieces.push_back({index, 0, item.bytes});
    return true;
  }

  void start_read(const ac_read_item& item, const ReadPiece& piece) {
    const uint64_t begin = item.offset + piece.begin;
    plan.reads.push_back({item.fd, item.direct != 0, begin, begin + piece.bytes, plan.pieces.size(), 1});
    plan.pieces.push_back(piece);
  }

  uint64_t block_bytes_;
  bool joinable_ = false;
};

}  // namespace

ReadPlan plan_reads(const ac_read_item* items, uint64_t count, uint64_t block_bytes) {
  Planner planner(block_bytes);
  for (const uint64_t index : in_disk_order(items, count)) planner.add(items[index], index);
  return std::move(planner.plan);
}

}  // namespace asyncckpt

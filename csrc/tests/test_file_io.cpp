// Drains and reads survive what a system call may do, and report what they cannot survive.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "asyncckpt.h"
#include "check.hpp"
#include "faults.hpp"
#include "mapping.hpp"

using namespace asyncckpt;

namespace {

constexpr uint64_t file_bytes = (3 << 20) + 4096 + 17;

// A file without a name; it is gone when it is closed.
class ScratchFile {
 public:
  explicit ScratchFile(int flags = 0) {
    char name[] = "core_test_XXXXXX";
    const int made = mkstemp(name);
    CHECK(made >= 0);
    fd_ = open(name, O_RDWR | flags);
    CHECK(fd_ >= 0);
    close(made);
    unlink(name);
  }
  ~ScratchFile() { close(fd_); }
  int fd() const { return fd_; }
  bool is_direct() const { return (fcntl(fd_, F_GETFL) & O_DIRECT) != 0; }

 private:
  int fd_;
};

Mapping pattern() {
  Mapping memory(file_bytes);
  for (uint64_t at = 0; at < file_bytes; ++at) memory.data()[at] = static_cast<char>(at * 2654435761u >> 13);
  return memory;
}

bool holds(const ScratchFile& file, const Mapping& expected) {
  fcntl(file.fd(), F_SETFL, 0);
  std::vector<char> found(file_bytes + 1);
  return pread(file.fd(), found.data(), found.size(), 0) == static_cast<ssize_t>(file_bytes) &&
         std::memcmp(found.data(), expected.data(), file_bytes) == 0;
}

ac_error drain_extents(const ScratchFile& file, const ac_span* extents, uint64_t count, uint64_t block_bytes) {
  const ac_file image{extents, count, file.fd(), file.is_direct()};
  const ac_drain_options options{block_bytes, 1, 1, 0, 1};
  ac_error error;
  ac_drain(&image, 1, nullptr, 0, nullptr, nullptr, &options, nullptr, nullptr, &error);
  return error;
}

ac_error drain(const ScratchFile& file, const Mapping& data, uint64_t block_bytes = 1 << 20) {
  const ac_span whole{data.data(), file_bytes};
  return drain_extents(file, &whole, 1, block_bytes);
}

ac_error read(const ScratchFile& file, std::vector<char>& target, uint64_t offset) {
  const ac_read_item item{target.data(), offset, target.size(), file.fd(), file.is_direct()};
  const ac_read_options options{0, 2};
  ac_error error;
  ac_read(&item, 1, nullptr, &options, nullptr, nullptr, &error);
  return error;
}

}  // namespace

TEST(drain_goes_on_after_interruptions) {
  const Mapping data = pattern();
  for (const Call call : {Call::pwrite, Call::fallocate}) {
    const ScratchFile file(O_DIRECT);
    const Fault fault = Fault::failing(call, EINTR, 0, 2);
    CHECK(drain(file, data).status == AC_OK);
    CHECK(holds(file, data));
  }
}

TEST(drain_goes_on_after_short_writes) {
  const Mapping data = pattern();
  for (const size_t bytes : {4096, 5000, 100'000}) {
    const ScratchFile file(O_DIRECT);
    const Fault fault = Fault::shortened(Call::pwrite, bytes);
    CHECK(drain(file, data).status == AC_OK);
    CHECK(holds(file, data));
  }
}

TEST(drain_goes_on_without_direct_io_when_it_is_refused) {
  const Mapping data = pattern();
  const ScratchFile file(O_DIRECT);
  const Fault fault = Fault::failing(Call::pwrite, EINVAL, 1, 1);
  CHECK(drain(file, data).status == AC_OK);
  CHECK(!file.is_direct());
  CHECK(holds(file, data));
}

TEST(drain_writes_through_the_cache_where_it_cannot_be_avoided) {
  const Mapping data = pattern();
  const ScratchFile file;
  const Fault fault = Fault::failing(Call::pwritev2, EOPNOTSUPP);
  CHECK(drain(file, data).status == AC_OK);
  CHECK(Fault::calls(Call::pwritev2) == 1);
  CHECK(holds(file, data));
}

TEST(drain_needs_no_reservation) {
  const Mapping data = pattern();
  const ScratchFile file(O_DIRECT);
  const Fault fault = Fault::failing(Call::fallocate, EOPNOTSUPP);
  CHECK(drain(file, data).status == AC_OK);
  CHECK(holds(file, data));
}

TEST(drain_reports_a_full_disk_before_it_writes) {
  const Mapping data = pattern();
  const ScratchFile file(O_DIRECT);
  const Fault none = Fault::failing(Call::pwrite, 0);
  const Fault fault = Fault::failing(Call::fallocate, ENOSPC);
  const ac_error error = drain(file, data);
  CHECK(error.status == AC_SYSTEM && error.sys_errno == ENOSPC);
  CHECK(Fault::calls(Call::pwrite) == 0);
}

TEST(drain_syncs_once_and_reports_its_failure) {
  const Mapping data = pattern();
  const ScratchFile file(O_DIRECT);
  const Fault fault = Fault::failing(Call::fsync, EIO);
  const ac_error error = drain(file, data);
  CHECK(error.status == AC_SYSTEM && error.sys_errno == EIO);
  CHECK(std::strstr(error.message, "cannot sync file 0") != nullptr);
  CHECK(Fault::calls(Call::fsync) == 1);
}

TEST(drain_reports_every_other_failure) {
  const Mapping data = pattern();
  for (const Call call : {Call::pwrite, Call::ftruncate}) {
    const ScratchFile file(O_DIRECT);
    const Fault fault = Fault::failing(call, EIO);
    const ac_error error = drain(file, data);
    CHECK(error.status == AC_SYSTEM && error.sys_errno == EIO && error.item == 0);
  }
}

TEST(drain_writes_every_extent_at_its_place_and_never_over_its_end) {
  const Mapping data = pattern();
  const char* bytes = data.data();
  // The first two lie behind each other in memory too; the last page is not whole.
  const ac_span extents[] = {{bytes, 4096}, {bytes + 4096, 8192}, {bytes, 0}, {bytes + 12288, file_bytes - 12288}};
  for (const int flags : {0, O_DIRECT}) {
    const ScratchFile file(flags);
    const Fault none = Fault::failing(Call::pwrite, 0);
    const Fault uncached = Fault::failing(Call::pwritev2, EOPNOTSUPP);
    CHECK(drain_extents(file, extents, 4, 16 << 20).status == AC_OK);
    CHECK(Fault::calls(Call::pwrite) == 3);
    CHECK(holds(file, data));
  }
}

TEST(drain_of_extents_goes_on_after_short_and_refused_writes) {
  const Mapping data = pattern();
  const char* bytes = data.data();
  constexpr uint64_t first = 1 << 20, second = 40960;
  const ac_span extents[] = {
      {bytes, first}, {bytes + first, second}, {bytes + first + second, file_bytes - first - second}};
  for (const size_t short_bytes : {4096, 5000, 100'000}) {
    const ScratchFile file(O_DIRECT);
    const Fault interrupted = Fault::failing(Call::fallocate, EINTR, 0, 1);
    const Fault shortened = Fault::shortened(Call::pwrite, short_bytes);
    CHECK(drain_extents(file, extents, 3, 1 << 19).status == AC_OK);
    CHECK(holds(file, data));
  }
  const ScratchFile file(O_DIRECT);
  const Fault refused = Fault::failing(Call::pwrite, EINVAL, 2, 1);
  CHECK(drain_extents(file, extents, 3, 1 << 19).status == AC_OK);
  CHECK(!file.is_direct());
  CHECK(holds(file, data));
}

TEST(extents_that_break_the_contract_are_refused_before_anything_is_written) {
  const Mapping data = pattern();
  const ScratchFile file(O_DIRECT);
  const ac_span misaligned[] = {{data.data(), 4096}, {data.data() + 1, 10}};
  const ac_span crumbs[] = {{data.data(), 100}, {data.data(), 4096}};
  const ac_span nowhere[] = {{nullptr, 1}};
  const ac_span endless[] = {{data.data(), INT64_MAX / 4096 * 4096}, {data.data(), INT64_MAX / 4096 * 4096}};
  const Fault none = Fault::failing(Call::pwrite, 0);
  CHECK(drain_extents(file, misaligned, 2, 0).status == AC_INVALID);
  CHECK(drain_extents(file, crumbs, 2, 0).status == AC_INVALID);
  CHECK(drain_extents(file, nowhere, 1, 0).status == AC_INVALID);
  CHECK(drain_extents(file, endless, 2, 0).status == AC_INVALID);
  CHECK(drain_extents(file, nullptr, 1, 0).status == AC_INVALID);
  CHECK(Fault::calls(Call::pwrite) == 0);
  CHECK(drain_extents(file, nullptr, 0, 0).status == AC_OK);
}

TEST(one_failed_file_ends_the_drain) {
  const Mapping data = pattern();
  std::vector<ScratchFile> files(8);
  std::vector<ac_file> images;
  const ac_span span{data.data(), file_bytes};
  for (const ScratchFile& file : files) images.push_back({&span, 1, file.fd(), 0});
  uint8_t digest[AC_DIGEST_BYTES];
  const ac_drain_options options{1 << 20, 3, 2, 1, 0};
  const Fault fault = Fault::failing(Call::ftruncate, EIO, 2, 1);
  ac_error error;
  CHECK(ac_drain(images.data(), images.size(), &span, 1, digest, nullptr, &options, nullptr, nullptr, &error) == AC_SYSTEM);
  CHECK(error.sys_errno == EIO && error.item < images.size());
}

TEST(read_goes_on_after_interruptions_and_short_reads) {
  const Mapping data = pattern();
  for (const int flags : {0, O_DIRECT}) {
    const ScratchFile file(flags);
    CHECK(drain(file, data).status == AC_OK);
    for (const size_t bytes : {4096, 5000, 100'000}) {
      if (flags != 0) fcntl(file.fd(), F_SETFL, flags);
      const Fault interrupted = Fault::failing(Call::pread, EINTR, 1, 2);
      const Fault shortened = Fault::shortened(Call::pread, bytes);
      std::vector<char> target(file_bytes - 100);
      CHECK(read(file, target, 100).status == AC_OK);
      CHECK(std::memcmp(target.data(), data.data() + 100, target.size()) == 0);
    }
  }
}

TEST(read_goes_on_without_direct_io_when_it_is_refused) {
  const Mapping data = pattern();
  const ScratchFile file(O_DIRECT);
  CHECK(drain(file, data).status == AC_OK);
  const Fault fault = Fault::failing(Call::pread, EINVAL, 0, 1);
  std::vector<char> target(file_bytes);
  CHECK(read(file, target, 0).status == AC_OK);
  CHECK(!file.is_direct());
  CHECK(std::memcmp(target.data(), data.data(), target.size()) == 0);
}

TEST(read_reports_its_failure) {
  const Mapping data = pattern();
  const ScratchFile file;
  CHECK(drain(file, data).status == AC_OK);
  const Fault fault = Fault::failing(Call::pread, EIO);
  std::vector<char> target(file_bytes);
  const ac_error error = read(file, target, 0);
  CHECK(error.status == AC_SYSTEM && error.sys_errno == EIO);
}

TEST(read_without_memory_for_its_buffer_says_so) {
  const Mapping data = pattern();
  const ScratchFile file(O_DIRECT);
  CHECK(drain(file, data).status == AC_OK);
  const Fault fault = Fault::failing(Call::mmap, ENOMEM);
  std::vector<char> target(1000);
  CHECK(read(file, target, 5).status == AC_NO_MEMORY);
}

TEST(broken_contracts_are_refused) {
  const ac_drain_options options{0, 1, 1, 3, 1};
  ac_error error;
  CHECK(ac_drain(nullptr, 1, nullptr, 0, nullptr, nullptr, &options, nullptr, nullptr, &error) == AC_INVALID);
  CHECK(ac_drain(nullptr, 0, nullptr, 0, nullptr, nullptr, &options, nullptr, nullptr, &error) == AC_INVALID);
  CHECK(ac_drain(nullptr, 0, nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr) == AC_INVALID);
  CHECK(ac_read(nullptr, 1, nullptr, nullptr, nullptr, nullptr, &error) == AC_INVALID);
  CHECK(ac_copy(nullptr, 1, 0, &error) == AC_INVALID);
  CHECK(ac_digest(nullptr, 1, nullptr, nullptr, 0, &error) == AC_INVALID);
  CHECK(ac_memory_map(0, nullptr, &error) == AC_INVALID);
  CHECK(error.message[0] != 0);
}

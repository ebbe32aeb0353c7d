// Allocator of large CPU tensors, which come from a region of memory of their own.
//
// torch allocates by posix_memalign(): glibc needs some bytes more than asked for to align a block, so that a block that is
// freed is too small for the next tensor of its size as soon as a small object lies beside it. Here blocks have the sizes of
// tensors, rounded to their alignment. Large tensors are placed by first fit in the order of addresses, others by best fit;
// free neighbors are joined. Freed memory stays with the process, on huge pages where the kernel has them, as long as no more
// pages are in memory than the blocks at the peak need: free pages beyond that are returned to the kernel.

#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace {

constexpr size_t kAlignment = 64;       // bytes, as torch's
constexpr size_t kSmallest = 64 << 10;  // bytes; smaller tensors are left to torch's allocator
constexpr size_t kLarge = 4 << 20;      // bytes; best fit would leave gaps between activations and gradients
constexpr size_t kHugePage = 2 << 20;   // bytes
constexpr size_t kSpareShare = 128;     // pages at the peak for each page that may be in memory beyond them

class Region {
 public:
  // Reserves address space, not memory: twice what the machine has, which leaves room for fragmentation.
  bool reserve() {
    rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY) return false;  // the reservation would count in full
    const size_t bytes = 2 * static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return false;
    const auto address = (reinterpret_cast<uintptr_t>(start) + kHugePage - 1) / kHugePage * kHugePage;
    start_ = top_ = reinterpret_cast<char*>(address);
    end_ = static_cast<char*>(start) + bytes;
    return true;
  }

  // From now on the kernel clears pages of 2 MiB, and joins small ones in the background.
  void use_huge_pages() const {
#ifdef MADV_HUGEPAGE
    madvise(start_, end_ - start_, MADV_HUGEPAGE);  // fails where the kernel has none, which does no harm
#endif
  }

  bool contains(const void* pointer) const { return start_ <= pointer && pointer < end_; }

  // Returns a block of at least this many bytes; nullptr if the region has no room left.
  char* allocate(size_t bytes) {
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    const std::lock_guard<std::mutex> guard(mutex_);
    auto [block, size] = find_free(bytes);
    if (block != nullptr) {
      remove_free(block, size);
      if (size > bytes) add_free(block + bytes, size - bytes);
    } else {
      block = top_;
      const auto last = free_.empty() ? free_.end() : std::prev(free_.end());
      if (last != free_.end() && last->first + last->second == top_) block = last->first;
      if (static_cast<size_t>(end_ - block) < bytes) return nullptr;
      if (block != top_) remove_free(block, last->second);
      top_ = block + bytes;
    }
    used_[block] = bytes;
    live_ += bytes;
    most_live_ = std::max(most_live_, live_);
    take_pages(block, bytes);
    return block;
  }

  void deallocate(char* block) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto entry = used_.find(block);
    size_t bytes = entry->second;
    used_.erase(entry);
    live_ -= bytes;
    const auto next = free_.lower_bound(block);
    if (next != free_.end() && block + bytes == next->first) {
      bytes += next->second;
      remove_free(next->first, next->second);
    }
    const auto after = free_.lower_bound(block);
    if (after != free_.begin()) {
      const auto [previous, size] = *std::prev(after);
      if (previous + size == block) {
        block = previous;
        bytes += size;
        remove_free(previous, size);
      }
    }
    add_free(block, bytes);
  }

  std::mutex& mutex() { return mutex_; }

 private:
  // Returns a free block of at least this many bytes and its size, or nullptr and 0.
  std::pair<char*, size_t> find_free(size_t bytes) const {
    if (bytes < kLarge) {
      const auto found = free_by_size_.lower_bound({bytes, nullptr});
      if (found != free_by_size_.end()) return {found->second, found->first};
    } else {
      const auto found = std::find_if(free_.begin(), free_.end(), [=](const auto& free) { return free.second >= bytes; });
      if (found != free_.end()) return *found;
    }
    return {nullptr, 0};
  }

  // Counts the pages of a block as in memory. Beyond the number at the peak, and a few, it returns free pages to the kernel,
  // those at the highest addresses first: large tensors take them last.
  void take_pages(char* block, size_t bytes) {
    const size_t before = pages_;
    resident_.resize(std::max(resident_.size(), page_of(block + bytes - 1) + 1));
    for (size_t page = page_of(block); page <= page_of(block + bytes - 1); ++page) {
      pages_ += !resident_[page];
      resident_[page] = true;
    }
    const size_t used = most_live_ / kHugePage, most = used + used / kSpareShare + 2;
    for (auto free = free_.rbegin(); pages_ > std::max(before, most) && free != free_.rend(); ++free)
      return_pages(free->first, free->second, pages_ - most);
  }

  // Returns up to `count` pages that lie within a free block to the kernel.
  void return_pages(char* block, size_t bytes, size_t count) {
    for (size_t page = page_of(block + kHugePage - 1); page < page_of(block + bytes) && count > 0; ++page) {
      if (!resident_[page] || madvise(start_ + page * kHugePage, kHugePage, MADV_DONTNEED) != 0) continue;
      resident_[page] = false;
      --pages_;
      --count;
    }
  }

  size_t page_of(const char* place) const { return static_cast<size_t>(place - start_) / kHugePage; }

  void add_free(char* block, size_t bytes) {
    free_[block] = bytes;
    free_by_size_.insert({bytes, block});
  }

  void remove_free(char* block, size_t bytes) {
    free_.erase(block);
    free_by_size_.erase({bytes, block});
  }

  char* start_ = nullptr;
  char* top_ = nullptr;  // what lies above was never used
  char* end_ = nullptr;
  std::mutex mutex_;
  std::map<char*, size_t> used_, free_;
  std::set<std::pair<size_t, char*>> free_by_size_;
  size_t live_ = 0, most_live_ = 0;  // bytes of blocks
  std::vector<bool> resident_;       // whether each page is in memory
  size_t pages_ = 0;                 // in memory
};

Region& region() {
  static auto* const instance = new Region;  // never deleted: tensors are freed until the process ends
  return *instance;
}

void free_tensor(void* pointer) {
  if (!region().contains(pointer)) return c10::GetDefaultCPUAllocator()->raw_deallocate(pointer);
  c10::profiledCPUMemoryReporter().Delete(pointer);
  region().deallocate(static_cast<char*>(pointer));
}

class RegionAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* block = bytes < kSmallest ? nullptr : region().allocate(bytes);
    if (block == nullptr) {
      block = c10::GetDefaultCPUAllocator()->raw_allocate(bytes);
    } else {
      c10::profiledCPUMemoryReporter().New(block, bytes);
    }
    return {block, block, &free_tensor, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_tensor; }

  void copy_data(void* dest, const void* src, size_t bytes) const override { default_copy_data(dest, src, bytes); }
};

}  // namespace

// Registers the allocator with torch; returns false if the address space cannot be reserved.
extern "C" bool use_tensor_region() {
  if (!region().reserve()) return false;
  pthread_atfork([] { region().mutex().lock(); }, [] { region().mutex().unlock(); }, [] { region().mutex().unlock(); });
  c10::SetCPUAllocator(new RegionAllocator);
  return true;
}

extern "C" void use_huge_pages() { region().use_huge_pages(); }

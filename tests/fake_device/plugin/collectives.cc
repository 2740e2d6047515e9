// A communicator is shared memory: a head, and a slot for each rank. A collective is a series of
// rounds: write the own slot, meet, read the slots, meet. It runs on the thread of its stream, so
// the host goes on at once; and like NCCL it waits for ever for a rank that does not come.
#include "collectives.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "memory.h"
#include "numbers.h"
#include "numbers_of_types.h"
#include "streams.h"

namespace {

constexpr size_t kHeadBytes = 4096, kSlotBytes = 1 << 20, kIdBytes = 64;

struct Head {
  std::atomic<uint32_t> arrived, round;
};

}  // namespace

struct C_CCLComm_st {
  size_t rank, num_ranks;
  char* base;
  std::string name;

  char* slot(size_t of) { return base + kHeadBytes + of * kSlotBytes; }

  void meet() {
    auto* head = reinterpret_cast<Head*>(base);
    uint32_t round = head->round.load();
    if (head->arrived.fetch_add(1) + 1 == num_ranks) {
      head->arrived.store(0);
      head->round.fetch_add(1);
      return;
    }
    for (int spins = 0; head->round.load() == round; ++spins)
      if (spins > 100) fake::pause_us(50);
  }
};

namespace fake {
namespace {

// Show `size` bytes at `own` (nullptr: none) to all ranks, as much at a time as a slot takes.
// read(offset, size) is called when the slots hold the part of everybody at `offset`.
template <typename Read>
void in_rounds(C_CCLComm comm, const char* own, size_t size, Read read) {
  for (size_t at = 0; at < size; at += kSlotBytes) {
    size_t part = std::min(kSlotBytes, size - at);
    if (own) std::memcpy(comm->slot(comm->rank), own + at, part);
    comm->meet();
    read(at, part);
    comm->meet();
  }
}

template <typename T>
T reduced(C_CCLComm comm, size_t index, C_CCLReduceOp how) {
  using W = typename Computed<T>::type;
  auto value = [&](size_t rank) { return static_cast<W>(reinterpret_cast<T*>(comm->slot(rank))[index]); };
  W total = value(0);
  for (size_t rank = 1; rank < comm->num_ranks; ++rank) {
    W one = value(rank);
    switch (how) {
      case MAX: total = std::max(total, one); break;
      case MIN: total = std::min(total, one); break;
      case PRODUCT: total = static_cast<W>(total * one); break;
      default: total = static_cast<W>(total + one);
    }
  }
  if (how == AVG) total = static_cast<W>(total / static_cast<W>(comm->num_ranks));
  return static_cast<T>(total);
}

void reduce_slots(C_CCLComm comm, char* to, size_t size, C_DataType type, C_CCLReduceOp how) {
  bool is_known = with_type(type, [&](auto one) {
    using T = decltype(one);
    for (size_t i = 0; i < size / sizeof(T); ++i)
      reinterpret_cast<T*>(to)[i] = reduced<T>(comm, i, how);
  });
  if (!is_known) std::abort();
}

C_Status put_collective(C_Stream stream, std::function<void()> work) {
  collectives.add(1);
  stream_of(stream).put([work = std::move(work), late = collective_us.get()] {
    pause_us(late);
    work();
  });
  return C_SUCCESS;
}

char* bytes_at(void* address) { return static_cast<char*>(reach(address)); }

C_Status all_reduce(void* send, void* receive, size_t count, C_DataType type, C_CCLReduceOp how,
                    C_CCLComm comm, C_Stream stream) {
  return put_collective(stream, [=] {
    in_rounds(comm, bytes_at(send), count * size_of(type), [&](size_t at, size_t size) {
      reduce_slots(comm, bytes_at(receive) + at, size, type, how);
    });
  });
}

C_Status reduce(void* send, void* receive, size_t count, C_DataType type, C_CCLReduceOp how,
                size_t root, C_CCLComm comm, C_Stream stream) {
  return put_collective(stream, [=] {
    in_rounds(comm, bytes_at(send), count * size_of(type), [&](size_t at, size_t size) {
      if (comm->rank == root) reduce_slots(comm, bytes_at(receive) + at, size, type, how);
    });
  });
}

C_Status reduce_scatter(void* send, void* receive, size_t count, C_DataType type, C_CCLReduceOp how,
                        C_CCLComm comm, C_Stream stream) {
  return put_collective(stream, [=] {
    size_t each = count * size_of(type);
    for (size_t rank = 0; rank < comm->num_ranks; ++rank)
      in_rounds(comm, bytes_at(send) + rank * each, each, [&](size_t at, size_t size) {
        if (comm->rank == rank) reduce_slots(comm, bytes_at(receive) + at, size, type, how);
      });
  });
}

C_Status all_gather(void* send, void* receive, size_t count, C_DataType type, C_CCLComm comm,
                    C_Stream stream) {
  return put_collective(stream, [=] {
    size_t each = count * size_of(type);
    in_rounds(comm, bytes_at(send), each, [&](size_t at, size_t size) {
      for (size_t rank = 0; rank < comm->num_ranks; ++rank)
        std::memcpy(bytes_at(receive) + rank * each + at, comm->slot(rank), size);
    });
  });
}

C_Status broadcast(void* buffer, size_t count, C_DataType type, size_t root, C_CCLComm comm,
                   C_Stream stream) {
  return put_collective(stream, [=] {
    char* own = bytes_at(buffer);
    in_rounds(comm, comm->rank == root ? own : nullptr, count * size_of(type),
              [&](size_t at, size_t size) { std::memcpy(own + at, comm->slot(root), size); });
  });
}

C_Status id_size(size_t* size) { return *size = kIdBytes, C_SUCCESS; }

C_Status make_id(C_CCLRootId* id) {
  static std::atomic<int> number{0};
  auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  std::memset(id->data, 0, id->sz);
  std::snprintf(static_cast<char*>(id->data), id->sz, "/fake_device-%d-%d-%lx", getpid(), ++number,
                static_cast<long>(now));
  return C_SUCCESS;
}

C_Status join(size_t num_ranks, C_CCLRootId* id, size_t rank, C_CCLComm* made) {
  std::string name(static_cast<char*>(id->data));
  int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
  size_t size = kHeadBytes + num_ranks * kSlotBytes;
  if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0) return C_FAILED;
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (base == MAP_FAILED) return C_FAILED;
  auto* comm = new C_CCLComm_st{rank, num_ranks, static_cast<char*>(base), name};
  comm->meet();
  if (rank == 0) shm_unlink(name.c_str());
  *made = comm;
  return C_SUCCESS;
}

C_Status leave(C_CCLComm) { return C_SUCCESS; }  // kept: a stream may still be inside

C_Status mark_group() { return C_SUCCESS; }

#ifdef FAKE_API_3
C_Status comm_name(C_CCLComm comm, char* name) {
  std::snprintf(name, 128, "%s", comm->name.c_str());
  return C_SUCCESS;
}
#endif

}  // namespace

void set_collective_functions(C_DeviceInterface* interface) {
  interface->xccl_get_unique_id_size = id_size;
  interface->xccl_get_unique_id = make_id;
  interface->xccl_comm_init_rank = join;
  interface->xccl_destroy_comm = leave;
  interface->xccl_all_reduce = all_reduce;
  interface->xccl_broadcast = broadcast;
  interface->xccl_reduce = reduce;
  interface->xccl_all_gather = all_gather;
  interface->xccl_reduce_scatter = reduce_scatter;
  interface->xccl_group_start = mark_group;
  interface->xccl_group_end = mark_group;
#ifdef FAKE_API_3
  interface->xccl_get_comm_name = comm_name;
#endif
}

}  // namespace fake

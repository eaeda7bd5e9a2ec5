// Loads one compiled kernel and runs it over a grid, every GPU thread a fiber.
//
// A process of its own: a wild write ends this process and nothing else. It reads a job file, runs the kernel
// once for each order of threads asked for, requires equal bits, and writes the outputs and a report.
//
// Every buffer and every threadgroup variable sits in an address range of its own with unmapped pages around it,
// far from the next, so that a fault's address names the buffer and the element, and an index that wrapped at
// 32 bits faults too. Instrumented kernels also report each access through the `__tsan_*` hooks below, which
// check exact bounds, races, unset memory and double writes.

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#ifdef __linux__
#include <ucontext.h>
#endif
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

struct msl_emu_position {
  u32 x, y, z, index;
};
struct msl_emu_group {
  u32 position[3], size[3], nominal[3], grid[3], groups[3];
};
struct msl_emu_call {
  void* slot[32];
  u32 lane[32];
  u32 count;
  u32 mask;
};
using Compute = void (*)(msl_emu_call*);
using Entry = void (*)(void* const* buffers, const msl_emu_position*, const msl_emu_group*);

// ---- switching stacks -----------------------------------------------------------------------------------

extern "C" void msl_emu_switch(void** save, void* to);
#if defined(__APPLE__)
#define SYMBOL(name) "_" name
#else
#define SYMBOL(name) name
#endif
#if defined(__x86_64__)
asm(".text\n.globl " SYMBOL("msl_emu_switch") "\n" SYMBOL("msl_emu_switch") ":\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
static void* first_frame(char* top, void (*run)()) {
  auto* p = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t(15));
  *--p = nullptr;  // the return address `run` never uses; keeps the stack aligned as after a call
  *--p = reinterpret_cast<void*>(run);
  for (int i = 0; i < 6; i++) *--p = nullptr;
  return p;
}
#elif defined(__aarch64__)
asm(".text\n.globl " SYMBOL("msl_emu_switch") "\n.p2align 2\n" SYMBOL("msl_emu_switch") ":\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp, #0]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\nstp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\nstp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\n"
    "mov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
    "ldp x19, x20, [sp, #0]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\nldp x25, x26, [sp, #48]\n"
    "ldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\nret\n");
static void* first_frame(char* top, void (*run)()) {
  auto* p = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(top) & ~uintptr_t(15)) - 160);
  memset(p, 0, 160);
  p[11] = reinterpret_cast<void*>(run);  // x30
  return p;
}
#else
#error "no stack switch for this processor"
#endif

// ---- the job --------------------------------------------------------------------------------------------

enum Role { kInput, kConstant, kOutput };
enum Order { kForward, kReverse, kRandom };
struct Buffer {
  Role role;
  size_t element = 1, bytes = 0;
  std::string file;
  std::vector<u8> init;
  char* slot = nullptr;
  char* data = nullptr;
  char* mapped = nullptr;
  size_t mapped_bytes = 0;
  std::atomic<u64>* writers = nullptr;
  std::vector<u8> first;  // the first run's bytes
};
struct Run {
  Order order;
  bool flush_end;
  u8 poison;
};
struct Job {
  std::string kernel, report;
  u32 threads = 1;
  u32 grid[3] = {1, 1, 1}, group[3] = {1, 1, 1};
  bool checked = false, count_blocks = false, allow_early = false, atomic = false;
  u32 timeout = 0;
  u64 seed = 0;
  size_t stack = 65536;
  std::vector<Buffer> buffers;
  std::vector<Run> runs;
};
static Job job;
static Entry entry;
static char* kernel_base;
static size_t kernel_bytes;
static size_t page;
static const size_t kGuard = 65536;  // unmapped below each stack
static u32 current_run;

// The reservation that all buffers live in.
static char* region;
static size_t region_bytes;
static int slot_shift;
// And the one for threadgroup variables: a slot for each variable of each worker.
static const u32 kMaxVariables = 64;
static const int kVariableShift = 26;
static char* local_region;
static size_t local_bytes;

// ---- reporting ------------------------------------------------------------------------------------------

struct Worker;
static thread_local Worker* W;
static std::atomic<bool> failing{false};

struct Report {
  char text[4096];
  size_t n = 0;
  void add(const char* format, ...) __attribute__((format(printf, 2, 3))) {
    va_list ap;
    va_start(ap, format);
    int m = vsnprintf(text + n, sizeof text - n, format, ap);
    va_end(ap);
    if (m > 0) n = n + size_t(m) < sizeof text ? n + size_t(m) : sizeof text - 1;
  }
};
[[noreturn]] static void stop(Report& r) {
  if (failing.exchange(true)) {
    for (;;) pause();
  }
  int fd = open(job.report.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (fd >= 0) {
    size_t done = 0;
    while (done < r.n) {
      ssize_t k = write(fd, r.text + done, r.n - done);
      if (k <= 0) break;
      done += size_t(k);
    }
    close(fd);
  }
  _exit(3);
}
static void add_here(Report& r);
// A return address in the kernel, or a line that the shim named, marked by the top bit.
static const u64 kLine = u64(1) << 63;
static void add_pc(Report& r, const char* name, u64 pc) {
  if (pc & kLine) return r.add("%.*sline %llu\n", int(strlen(name)) - 2, name, (unsigned long long)(pc & ~kLine));
  u64 base = reinterpret_cast<u64>(kernel_base);
  if (pc > base && pc - base < (u64(1) << 32)) r.add("%s 0x%llx\n", name, (unsigned long long)(pc - base));
}
[[noreturn]] static void broken(const char* what) {
  Report r;
  r.add("error runner\nwhat %s\n", what);
  stop(r);
}

// ---- workers and lanes ----------------------------------------------------------------------------------

enum State : u8 { kNew, kRunning, kAtSimd, kAtBarrier, kDone };
struct Fiber {
  void* sp;
  char* low;
};
struct Lane {
  void* sp;
  Fiber* fiber;
  void* slot;
  Compute compute;
  u32 op, flags;
  int line;
  State state;
  bool reached_end;
};
struct Simd {
  u32 alive, arrived;
  u64 epoch;
};
struct Reader {
  u64 pc;
  u64 epoch, simd_epoch;
  u32 thread;
};
struct Cell {  // one byte of threadgroup memory
  u64 pc;
  u64 epoch, simd_epoch;  // of the last write; epoch 0: never
  u32 thread;
  Reader read[2];
};
struct Variable {
  char* data = nullptr;
  size_t bytes = 0;
  const char* name = nullptr;
  u64 group_epoch = 0;
  char* mapped = nullptr;
  size_t mapped_bytes = 0;
  std::vector<Cell> cells;
};
struct Counts {
  u64 device_loads = 0, device_load_bytes = 0, device_stores = 0, device_store_bytes = 0, constant_loads = 0,
      constant_load_bytes = 0, threadgroup_loads = 0, threadgroup_load_bytes = 0, threadgroup_stores = 0,
      threadgroup_store_bytes = 0, atomics = 0, barriers = 0, simdgroup_barriers = 0, simd_moves = 0,
      simd_reductions = 0, matrix_loads = 0, matrix_products = 0, threads = 0;
};
struct Worker {
  u32 id = 0;
  u32 n = 0, done = 0, early = 0, at_barrier = 0, current = 0;
  msl_emu_group group{};
  u64 group_index = 0;
  std::vector<Lane> lanes;
  std::vector<Simd> simds;
  std::vector<msl_emu_position> positions;
  u32 shape[3] = {0, 0, 0};
  std::vector<u32> order;
  std::vector<u32> stack;  // lanes ready to run, the next one last
  std::vector<Fiber> fibers;
  std::vector<Fiber*> free;
  void* scheduler = nullptr;
  std::vector<void*> buffers;
  u64 epoch = 1, group_start = 1, device_epoch = 1;
  Variable variables[kMaxVariables];
  Counts counts;
  std::vector<u64> blocks;  // executions by offset into the kernel's code
  u64 random = 1;
  u64 hint = 0;  // the line that the accesses of a matrix load or store belong to
  Order how = kForward;
  u8 poison = 0;
  bool flush_end = false;
  u64 next_random() {
    random ^= random << 13, random ^= random >> 7, random ^= random << 17;
    return random;
  }
};

static void add_here(Report& r) {
  r.add("run %u\n", current_run);
  if (!W) return;
  Worker& w = *W;
  const auto& g = w.group;
  r.add("group %u %u %u\n", g.position[0], g.position[1], g.position[2]);
  if (w.current < w.positions.size()) {
    const auto& p = w.positions[w.current];
    r.add("thread %u %u %u\n", g.position[0] * g.nominal[0] + p.x, g.position[1] * g.nominal[1] + p.y,
          g.position[2] * g.nominal[2] + p.z);
    r.add("in_group %u\n", w.current);
  }
}

static void fiber_main();

static inline void go(Worker& w, void** save, u32 next) {
  w.current = next;
  Lane& l = w.lanes[next];
  if (l.state == kNew) {
    Fiber* f = w.free.back();
    w.free.pop_back();
    l.fiber = f;
    msl_emu_switch(save, f->sp);
  } else {
    l.state = kRunning;
    msl_emu_switch(save, l.sp);
  }
}
static inline void leave(Worker& w, Lane& l) {
  if (w.stack.empty()) {
    msl_emu_switch(&l.sp, w.scheduler);
  } else {
    u32 next = w.stack.back();
    w.stack.pop_back();
    go(w, &l.sp, next);
  }
}

static const char* op_name(u32 op) {
  static const char* names[] = {"",
                                "simd_shuffle",
                                "simd_shuffle_up",
                                "simd_shuffle_down",
                                "simd_shuffle_xor",
                                "simd_shuffle_rotate_up",
                                "simd_shuffle_rotate_down",
                                "simd_shuffle_and_fill_up",
                                "simd_shuffle_and_fill_down",
                                "simd_broadcast",
                                "simd_broadcast_first",
                                "simd_sum",
                                "simd_product",
                                "simd_min",
                                "simd_max",
                                "simd_and",
                                "simd_or",
                                "simd_xor",
                                "simd_all",
                                "simd_any",
                                "simd_ballot",
                                "simd_prefix_inclusive_sum",
                                "simd_prefix_exclusive_sum",
                                "simd_first"};
  op &= 0xffff;
  if (op < sizeof names / sizeof *names) return names[op];
  switch (op) {
    case 100: return "simdgroup_load";
    case 101: return "simdgroup_store";
    case 102: return "simdgroup_multiply_accumulate";
    case 200: return "simdgroup_barrier";
    default: return "a SIMD operation";
  }
}
static const u32 kSimdgroupBarrier = 200;

static void describe(Report& r, const char* who, Worker& w, u32 lane) {
  Lane& l = w.lanes[lane];
  r.add("%s_thread %u\n", who, lane);
  switch (l.state) {
    case kAtSimd: r.add("%s_at %s\n%s_line %d\n", who, op_name(l.op), who, l.line); break;
    case kAtBarrier: r.add("%s_at threadgroup_barrier\n%s_line %d\n", who, who, l.line); break;
    case kDone: r.add("%s_at %s\n", who, l.reached_end ? "the end of the body" : "an early return"); break;
    default: r.add("%s_at elsewhere\n", who);
  }
}
[[noreturn]] static void diverged(Worker& w, u32 a, u32 b) {
  Report r;
  r.add("error divergence\n");
  w.current = a;
  add_here(r);
  describe(r, "a", w, a);
  describe(r, "b", w, b);
  stop(r);
}

static inline void push_others(Worker& w, u32 begin, u32 end, u32 self) {
  // The next to run goes last; lanes that are done do not come back.
  auto ready = [&](u32 i) {
    if (i != self && w.lanes[i].state != kDone) w.stack.push_back(i);
  };
  if (w.how == kForward) {
    for (u32 i = end; i-- > begin;) ready(i);
  } else if (w.how == kReverse) {
    for (u32 i = begin; i < end; i++) ready(i);
  } else {
    u32 n = end - begin, start = u32(w.next_random() % n);
    for (u32 i = 0; i < n; i++) {
      u32 j = start + i;
      ready(begin + (j >= n ? j - n : j));
    }
  }
}

// All lanes of the SIMD group that still run have arrived.
static void meet(Worker& w, u32 simd, u32 self) {
  Simd& s = w.simds[simd];
  u32 begin = simd * 32, end = begin + 32 < w.n ? begin + 32 : w.n;
  msl_emu_call call;
  call.count = 0;
  call.mask = 0;
  u32 first = ~0u;
  for (u32 i = begin; i < end; i++) {
    Lane& l = w.lanes[i];
    if (l.state != kAtSimd) continue;
    if (first == ~0u) first = i;
    const Lane& f = w.lanes[first];
    if (l.op != f.op || l.line != f.line) diverged(w, first, i);
    call.slot[call.count] = l.slot;
    call.lane[call.count] = i - begin;
    call.mask |= 1u << (i - begin);
    call.count++;
  }
  s.arrived = 0;
  Lane& f = w.lanes[first];
  u32 saved = w.current;
  w.current = first;
  if (f.compute) f.compute(&call);
  else if (f.op == kSimdgroupBarrier && (f.flags & 2)) s.epoch++;
  w.current = saved;
  push_others(w, begin, end, self);
}

static void count_op(Worker& w, u32 op) {
  op &= 0xffff;
  if (op <= 10) w.counts.simd_moves++;
  else if (op < 100) w.counts.simd_reductions++;
  else if (op == 102) w.counts.matrix_products++;
  else if (op == kSimdgroupBarrier) w.counts.simdgroup_barriers++;
  else w.counts.matrix_loads++;
}
static inline void arrive(u32 op, u32 flags, int line, void* slot, Compute compute) {
  Worker& w = *W;
  u32 self = w.current, simd = self >> 5;
  Lane& l = w.lanes[self];
  l.state = kAtSimd;
  l.op = op;
  l.flags = flags;
  l.line = line;
  l.slot = slot;
  l.compute = compute;
  count_op(w, op);
  Simd& s = w.simds[simd];
  if (++s.arrived == s.alive) {
    meet(w, simd, self);
    l.state = kRunning;
  } else {
    leave(w, l);
  }
}
extern "C" {
void msl_emu_simd(u32 op, int line, void* slot, Compute compute) { arrive(op, 0, line, slot, compute); }
void msl_emu_simdgroup_barrier(u32 flags, int line) { arrive(kSimdgroupBarrier, flags, line, nullptr, nullptr); }
}

static void release_barrier(Worker& w, u32 self) {
  u32 first = ~0u, flags = 0;
  for (u32 i = 0; i < w.n; i++) {
    Lane& l = w.lanes[i];
    if (l.state != kAtBarrier) continue;
    if (first == ~0u) first = i, flags = l.flags;
    if (l.line != w.lanes[first].line) diverged(w, first, i);
  }
  if (flags & 2) w.epoch++;
  if (flags & 1) w.device_epoch++;
  w.at_barrier = 0;
  push_others(w, 0, w.n, self);
}
extern "C" void msl_emu_barrier(u32 flags, int line) {
  Worker& w = *W;
  Lane& l = w.lanes[w.current];
  l.state = kAtBarrier;
  l.line = line;
  l.flags = flags;
  w.counts.barriers++;
  u32 expected = w.n - (job.allow_early ? w.early : 0);
  if (++w.at_barrier == expected) {
    release_barrier(w, w.current);
    l.state = kRunning;
  } else {
    leave(w, l);
  }
}
extern "C" {
void msl_emu_line(int line) { W->hint = line ? kLine | u64(line) : 0; }
u32 msl_emu_lane() { return W->current & 31; }
void msl_emu_body_end() {
  Worker& w = *W;
  w.lanes[w.current].reached_end = true;
}
void msl_emu_bad_lane(u32 from, int named) {
  Worker& w = *W;
  u32 begin = w.current & ~31u;
  w.current = begin + from;
  Report r;
  r.add("error bad_lane\n");
  add_here(r);
  r.add("line %d\nop %s\nlane %u\nnamed %d\n", w.lanes[w.current].line, op_name(w.lanes[w.current].op), from, named);
  stop(r);
}
void msl_emu_not_uniform(u32 lane, const char* what) {
  Worker& w = *W;
  w.current = (w.current & ~31u) + lane;
  Report r;
  r.add("error not_uniform\n");
  add_here(r);
  r.add("line %d\nop %s\nwhat %s\n", w.lanes[w.current].line, op_name(w.lanes[w.current].op), what);
  stop(r);
}
}

static void finish(Worker& w) {
  u32 i = w.current;
  Lane& l = w.lanes[i];
  l.state = kDone;
  w.done++;
  if (l.reached_end) return;
  // An early return leaves the SIMD group: the others go on without this lane.
  w.early++;
  Simd& s = w.simds[i >> 5];
  s.alive--;
  if (s.alive && s.arrived == s.alive) meet(w, i >> 5, i);
  else if (job.allow_early && w.at_barrier && w.at_barrier == w.n - w.early) release_barrier(w, i);
}
static void fiber_main() {
  for (;;) {
    Worker& w = *W;
    u32 i = w.current;
    Lane& l = w.lanes[i];
    Fiber* f = l.fiber;
    l.state = kRunning;
    l.reached_end = false;
    entry(w.buffers.data(), &w.positions[i], &w.group);
    finish(w);
    if (w.stack.empty()) {
      w.free.push_back(f);
      msl_emu_switch(&f->sp, w.scheduler);
      continue;
    }
    u32 next = w.stack.back();
    w.stack.pop_back();
    w.current = next;
    Lane& m = w.lanes[next];
    if (m.state == kNew) {
      m.fiber = f;
      continue;
    }
    m.state = kRunning;
    w.free.push_back(f);
    msl_emu_switch(&f->sp, m.sp);
  }
}

[[noreturn]] static void stuck(Worker& w) {
  // Nobody can go on: some lanes wait for others that wait elsewhere or have ended.
  for (u32 i = 0; i < w.n; i++) {
    if (w.lanes[i].state != kAtSimd) continue;
    u32 begin = i & ~31u, end = begin + 32 < w.n ? begin + 32 : w.n;
    for (u32 j = begin; j < end; j++) {
      const Lane &a = w.lanes[i], &b = w.lanes[j];
      if (b.state == kDone && !b.reached_end) continue;
      if (b.state != kAtSimd || a.op != b.op || a.line != b.line) diverged(w, i, j);
    }
  }
  for (u32 i = 0; i < w.n; i++) {
    if (w.lanes[i].state != kAtBarrier) continue;
    for (u32 j = 0; j < w.n; j++) {
      if (w.lanes[j].state != kAtBarrier) diverged(w, i, j);
    }
  }
  broken("threads are stuck for no known reason");
}

// ---- threadgroup memory ---------------------------------------------------------------------------------

static char* map_slot(char* slot, int shift, size_t bytes, bool flush_end, char** mapped, size_t* mapped_bytes) {
  size_t len = (bytes + page - 1) / page * page;
  char* middle = slot + (size_t(1) << (shift - 1));
  if (len && mprotect(middle, len, PROT_READ | PROT_WRITE) != 0) broken("cannot map a buffer");
  *mapped = middle;
  *mapped_bytes = len;
  // Sixteen bytes keep every vector type aligned; the rest of them is filled and looked at afterwards.
  size_t padded = (bytes + 15) & ~size_t(15);
  return flush_end ? middle + len - padded : middle;
}
static void unmap_slot(char* mapped, size_t bytes) {
  if (!bytes) return;
  void* p = mmap(mapped, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (p == MAP_FAILED) broken("cannot unmap a buffer");
}

extern "C" void* msl_emu_threadgroup(u32 id, size_t size, size_t, const char* name) {
  Worker& w = *W;
  if (id >= kMaxVariables || size > (size_t(1) << (kVariableShift - 2))) broken("too much threadgroup memory");
  Variable& v = w.variables[id];
  if (!v.data) {
    char* slot = local_region + ((size_t(w.id) * kMaxVariables + id) << kVariableShift);
    v.data = map_slot(slot, kVariableShift, size, w.flush_end, &v.mapped, &v.mapped_bytes);
    v.bytes = size;
    v.name = name;
    if (job.checked) v.cells.resize(size);
  }
  if (v.group_epoch != w.group_start) {
    v.group_epoch = w.group_start;
    memset(v.mapped, w.poison, v.mapped_bytes);
  }
  return v.data;
}

// ---- checked accesses -----------------------------------------------------------------------------------

static u64 writer_now(const Worker& w) {
  u64 id = w.group_index * (u64(w.group.nominal[0]) * w.group.nominal[1] * w.group.nominal[2]) + w.current;
  return ((id + 1) << 16) | (w.device_epoch & 0xffff);
}
static void add_buffer(Report& r, u32 index, long long offset, size_t size) {
  const Buffer& b = job.buffers[index];
  r.add("buffer %u\nbyte %lld\nelement %lld\nsize %zu\n", index, offset,
        offset >= 0 ? offset / (long long)b.element
                    : -((-offset + (long long)b.element - 1) / (long long)b.element),
        size);
}
[[noreturn]] static __attribute__((cold, noinline)) void bad_device(const char* kind, u32 index, long long offset,
                                                                   size_t size, u64 pc, int line, u64 other) {
  Report r;
  r.add("error %s\n", kind);
  add_here(r);
  add_buffer(r, index, offset, size);
  if (pc) add_pc(r, "pc", pc);
  if (line) r.add("line %d\n", line);
  if (other) {
    u64 nominal = u64(job.group[0]) * job.group[1] * job.group[2];
    u64 id = (other >> 16) - 1;
    r.add("other_group %llu\nother_in_group %llu\n", (unsigned long long)(id / nominal),
          (unsigned long long)(id % nominal));
  }
  stop(r);
}
static bool same_group(const Worker& w, u64 other) {
  u64 nominal = u64(w.group.nominal[0]) * w.group.nominal[1] * w.group.nominal[2];
  return ((other >> 16) - 1) / nominal == w.group_index;
}

static inline void device_access(Worker& w, uintptr_t off, size_t size, bool write, bool atomic, u64 pc, int line) {
  u32 index = u32(off >> slot_shift);
  if (index >= job.buffers.size()) index = u32(job.buffers.size()) - 1;
  Buffer& b = job.buffers[index];
  long long at = (long long)(reinterpret_cast<uintptr_t>(region) + off) - (long long)reinterpret_cast<uintptr_t>(b.data);
  if (at < 0 || size_t(at) + size > b.bytes) {
    bad_device(write ? "out_of_bounds_write" : "out_of_bounds_read", index, at, size, pc, line, 0);
  }
  if (size <= 16 && (size & (size - 1)) == 0 && (size_t(at) & (size - 1)) != 0) {
    bad_device("misaligned", index, at, size, pc, line, 0);
  }
  if (write && b.role != kOutput) bad_device("input_write", index, at, size, pc, line, 0);
  if (atomic) w.counts.atomics++;
  else if (write) w.counts.device_stores++, w.counts.device_store_bytes += size;
  else if (b.role == kConstant) w.counts.constant_loads++, w.counts.constant_load_bytes += size;
  else w.counts.device_loads++, w.counts.device_load_bytes += size;
  if (b.role != kOutput) return;
  size_t first = size_t(at) / b.element, last = (size_t(at) + size - 1) / b.element;
  const u64 kAtomicWriter = ~u64(0);
  if (atomic) {
    for (size_t e = first; e <= last; e++) {
      if (write) b.writers[e].store(kAtomicWriter, std::memory_order_relaxed);
      else if (b.init.empty() && b.writers[e].load(std::memory_order_relaxed) == 0) {
        bad_device("uninitialised_output", index, at, size, pc, line, 0);
      }
    }
    return;
  }
  u64 me = writer_now(w);
  for (size_t e = first; e <= last; e++) {
    u64 other = write ? b.writers[e].exchange(me, std::memory_order_relaxed)
                      : b.writers[e].load(std::memory_order_relaxed);
    if (!write && other == 0 && b.init.empty()) bad_device("uninitialised_output", index, at, size, pc, line, 0);
    if (other == 0 || other == kAtomicWriter || (other >> 16) == (me >> 16)) continue;
    if (same_group(w, other) && (other & 0xffff) != (me & 0xffff)) continue;
    bad_device(write ? "double_write" : "output_race", index, at, size, pc, line, other);
  }
}

[[noreturn]] static __attribute__((cold, noinline)) void bad_local(Worker& w, const char* kind, u32 id, long long at,
                                                                  size_t size, u64 pc, u64 other_pc, u32 other,
                                                                  const char* other_did) {
  Report r;
  r.add("error %s\n", kind);
  add_here(r);
  r.add("variable %s\nbyte %lld\nsize %zu\n", w.variables[id].name ? w.variables[id].name : "?", at, size);
  add_pc(r, "pc", pc);
  if (other_did) {
    r.add("other_in_group %u\nother_did %s\n", other, other_did);
    add_pc(r, "other_pc", other_pc);
  }
  stop(r);
}
static inline bool concurrent(const Worker& w, u64 epoch, u64 simd_epoch, u32 thread, u32 me) {
  if (thread == me || epoch != w.epoch) return false;
  return (thread >> 5) != (me >> 5) || simd_epoch == w.simds[me >> 5].epoch;
}
static inline void local_access(Worker& w, uintptr_t off, size_t size, bool write, u64 pc) {
  u32 global = u32(off >> kVariableShift), id = global % kMaxVariables;
  Variable& v = w.variables[id];
  long long at =
      (long long)(reinterpret_cast<uintptr_t>(local_region) + off) - (long long)reinterpret_cast<uintptr_t>(v.data);
  if (global / kMaxVariables != w.id || !v.data || at < 0 || size_t(at) + size > v.bytes) {
    bad_local(w, write ? "threadgroup_out_of_bounds_write" : "threadgroup_out_of_bounds_read", id, at, size, pc, 0, 0,
              nullptr);
  }
  if (write) w.counts.threadgroup_stores++, w.counts.threadgroup_store_bytes += size;
  else w.counts.threadgroup_loads++, w.counts.threadgroup_load_bytes += size;
  u32 me = w.current;
  u64 simd_epoch = w.simds[me >> 5].epoch;
  for (size_t k = 0; k < size; k++) {
    Cell& c = v.cells[size_t(at) + k];
    bool written = c.epoch >= w.group_start;
    if (written && concurrent(w, c.epoch, c.simd_epoch, c.thread, me)) {
      bad_local(w, write ? "race_write" : "race_read", id, at, size, pc, c.pc, c.thread, "write");
    }
    if (write) {
      for (Reader& r : c.read) {
        if (r.epoch >= w.group_start && concurrent(w, r.epoch, r.simd_epoch, r.thread, me)) {
          bad_local(w, "race_write", id, at, size, pc, r.pc, r.thread, "read");
        }
      }
      c.pc = pc, c.epoch = w.epoch, c.simd_epoch = simd_epoch, c.thread = me;
      continue;
    }
    if (!written) bad_local(w, "uninitialised_threadgroup", id, at, size, pc, 0, 0, nullptr);
    // Two readers are kept, of different SIMD groups where there are such: one of them stands for all.
    Reader now{pc, w.epoch, simd_epoch, me};
    auto live = [&](const Reader& r) {
      return r.epoch == w.epoch && ((r.thread >> 5) != (me >> 5) || r.simd_epoch == simd_epoch);
    };
    if (!live(c.read[0]) || c.read[0].thread == me) c.read[0] = now;
    else if (!live(c.read[1]) || c.read[1].thread == me) c.read[1] = now;
    else if ((c.read[0].thread >> 5) == (c.read[1].thread >> 5) && (c.read[0].thread >> 5) != (me >> 5)) c.read[1] = now;
  }
}
static inline void access(void* address, size_t size, bool write, u64 pc) {
  if (W && W->hint) pc = W->hint;
  uintptr_t a = reinterpret_cast<uintptr_t>(address);
  uintptr_t off = a - reinterpret_cast<uintptr_t>(region);
  if (off < region_bytes) return device_access(*W, off, size, write, false, pc, 0);
  off = a - reinterpret_cast<uintptr_t>(local_region);
  if (off < local_bytes) return local_access(*W, off, size, write, pc);
}
extern "C" void msl_emu_atomic(void* at, u32 size, int line, int writes) {
  if (!job.checked) return;
  Worker& w = *W;
  uintptr_t a = reinterpret_cast<uintptr_t>(at);
  uintptr_t off = a - reinterpret_cast<uintptr_t>(region);
  if (off < region_bytes) return device_access(w, off, size, writes != 0, true, 0, line);
  off = a - reinterpret_cast<uintptr_t>(local_region);
  if (off >= local_bytes) return;
  // In threadgroup memory an atomic makes its bytes written and takes part in no race.
  u32 id = u32(off >> kVariableShift) % kMaxVariables;
  Variable& v = w.variables[id];
  long long rel = (long long)a - (long long)reinterpret_cast<uintptr_t>(v.data);
  if (!v.data || rel < 0 || size_t(rel) + size > v.bytes) {
    bad_local(w, "threadgroup_out_of_bounds_write", id, rel, size, 0, 0, 0, nullptr);
  }
  w.counts.atomics++;
  for (size_t k = 0; k < size; k++) {
    Cell& c = v.cells[size_t(rel) + k];
    c.epoch = w.epoch, c.thread = w.current, c.simd_epoch = ~u64(0), c.pc = 0;
  }
}

#define PC reinterpret_cast<u64>(__builtin_return_address(0))
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
#define HOOKS(n)                                                            \
  void __tsan_read##n(void* p) { access(p, n, false, PC); }                 \
  void __tsan_write##n(void* p) { access(p, n, true, PC); }                 \
  void __tsan_unaligned_read##n(void* p) { access(p, n, false, PC); }       \
  void __tsan_unaligned_write##n(void* p) { access(p, n, true, PC); }       \
  void __tsan_read_write##n(void* p) {                                      \
    access(p, n, false, PC);                                                \
    access(p, n, true, PC);                                                 \
  }                                                                         \
  void __tsan_volatile_read##n(void* p) { access(p, n, false, PC); }        \
  void __tsan_volatile_write##n(void* p) { access(p, n, true, PC); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* p, size_t n) { access(p, n, false, PC); }
void __tsan_write_range(void* p, size_t n) { access(p, n, true, PC); }
void* __tsan_memcpy(void* d, const void* s, size_t n) {
  access(const_cast<void*>(s), n, false, PC);
  access(d, n, true, PC);
  return memcpy(d, s, n);
}
void* __tsan_memmove(void* d, const void* s, size_t n) {
  access(const_cast<void*>(s), n, false, PC);
  access(d, n, true, PC);
  return memmove(d, s, n);
}
void* __tsan_memset(void* d, int c, size_t n) {
  access(d, n, true, PC);
  return memset(d, c, n);
}

// Indices outside an array whose size the compiler knows, and shifts by more than the width.
struct SourceLocation {
  const char* file;
  u32 line, column;
};
static void bad_code(const char* kind, const SourceLocation* at, long long value) {
  Report r;
  r.add("error %s\n", kind);
  add_here(r);
  if (at->file && strstr(at->file, "kernel.metal")) r.add("line %u\n", at->line);
  r.add("value %lld\n", value);
  stop(r);
}
void __ubsan_handle_out_of_bounds(SourceLocation* data, void* index) {
  bad_code("array_index", data, (long long)reinterpret_cast<intptr_t>(index));
}
void __ubsan_handle_out_of_bounds_abort(SourceLocation* data, void* index) { __ubsan_handle_out_of_bounds(data, index); }
void __ubsan_handle_shift_out_of_bounds(SourceLocation* data, void*, void* by) {
  bad_code("shift", data, (long long)reinterpret_cast<intptr_t>(by));
}
void __ubsan_handle_shift_out_of_bounds_abort(SourceLocation* data, void* l, void* r) {
  __ubsan_handle_shift_out_of_bounds(data, l, r);
}
void __ubsan_handle_divrem_overflow(SourceLocation* data, void*, void*) { bad_code("division", data, 0); }
void __ubsan_handle_divrem_overflow_abort(SourceLocation* data, void* l, void* r) {
  __ubsan_handle_divrem_overflow(data, l, r);
}

struct TypeMismatch {
  SourceLocation at;
  const void* type;
  u8 log_alignment, kind;
};
void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, void* address) {
  uintptr_t off = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(region);
  size_t size = size_t(1) << data->log_alignment;
  int line = data->at.file && strstr(data->at.file, "kernel.metal") ? int(data->at.line) : 0;
  u64 pc = line ? 0 : PC;
  if (off < region_bytes) {
    u32 index = u32(off >> slot_shift);
    if (index >= job.buffers.size()) index = u32(job.buffers.size()) - 1;
    bad_device("misaligned", index, static_cast<char*>(address) - job.buffers[index].data, size, pc, line, 0);
  }
  Report r;
  r.add("error misaligned_local\n");
  add_here(r);
  r.add("size %zu\n", size);
  if (line) r.add("line %d\n", line);
  add_pc(r, "pc", pc);
  stop(r);
}
void __ubsan_handle_type_mismatch_v1_abort(TypeMismatch* data, void* address) {
  __ubsan_handle_type_mismatch_v1(data, address);
}

void __sanitizer_cov_trace_pc() {
  u64 off = PC - reinterpret_cast<u64>(kernel_base);
  Worker* w = W;
  if (w && off < w->blocks.size()) w->blocks[off]++;
}
}

// ---- faults ---------------------------------------------------------------------------------------------

static void on_signal(int number, siginfo_t* info, void* context) {
  u64 pc = 0;
  bool write = false, known = false;
#if defined(__linux__) && defined(__x86_64__)
  auto* u = static_cast<ucontext_t*>(context);
  pc = u64(u->uc_mcontext.gregs[REG_RIP]) + 1;  // as a return address: one past
  write = (u->uc_mcontext.gregs[REG_ERR] & 2) != 0;
  known = true;
#elif defined(__linux__) && defined(__aarch64__)
  auto* u = static_cast<ucontext_t*>(context);
  pc = u64(u->uc_mcontext.pc) + 1;
  // The syndrome register, where the kernel passes it, says whether it was a write.
  auto* records = reinterpret_cast<const u8*>(u->uc_mcontext.__reserved);
  for (size_t i = 0; i + 16 <= sizeof u->uc_mcontext.__reserved;) {
    u32 head[2];
    memcpy(head, records + i, sizeof head);
    if (head[0] == 0 || head[1] == 0) break;
    if (head[0] == 0x45535201) {
      u64 syndrome;
      memcpy(&syndrome, records + i + 8, sizeof syndrome);
      write = (syndrome >> 6) & 1;
      known = true;
      break;
    }
    i += head[1];
  }
#else
  (void)context;
#endif
  Report r;
  auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  if (number == SIGALRM) {
    r.add("error timeout\nseconds %u\n", job.timeout);
    add_here(r);
    stop(r);
  }
  if (number == SIGFPE) {
    r.add("error division\n");
    add_here(r);
    add_pc(r, "pc", pc);
    stop(r);
  }
  uintptr_t off = address - reinterpret_cast<uintptr_t>(region);
  if (off < region_bytes) {
    u32 index = u32(off >> slot_shift);
    if (index >= job.buffers.size()) index = u32(job.buffers.size()) - 1;
    const Buffer& b = job.buffers[index];
    long long at = (long long)address - (long long)reinterpret_cast<uintptr_t>(b.data);
    bool inside = at >= 0 && size_t(at) < b.bytes;
    const char* kind = inside ? "input_write" : !known ? "out_of_bounds" : write ? "out_of_bounds_write" : "out_of_bounds_read";
    bad_device(kind, index, at, 0, pc, 0, 0);
  }
  off = address - reinterpret_cast<uintptr_t>(local_region);
  if (off < local_bytes && W) {
    u32 id = u32(off >> kVariableShift) % kMaxVariables;
    long long at = (long long)address - (long long)reinterpret_cast<uintptr_t>(W->variables[id].data);
    bad_local(*W, !known ? "threadgroup_out_of_bounds" : write ? "threadgroup_out_of_bounds_write" : "threadgroup_out_of_bounds_read",
              id, at, 0, pc, 0, 0, nullptr);
  }
  if (W) {
    for (const Fiber& f : W->fibers) {
      auto low = reinterpret_cast<uintptr_t>(f.low);
      if (address < low && address >= low - kGuard) {
        r.add("error stack_overflow\nbytes %zu\n", job.stack);
        add_here(r);
        stop(r);
      }
    }
  }
  r.add("error wild_access\nsignal %d\naddress 0x%llx\n", number, (unsigned long long)address);
  add_here(r);
  add_pc(r, "pc", pc);
  stop(r);
}

// ---- running --------------------------------------------------------------------------------------------

static std::atomic<u64> next_group;

static void run_group(Worker& w, u64 index) {
  const u32 tx = (job.grid[0] + job.group[0] - 1) / job.group[0];
  const u32 ty = (job.grid[1] + job.group[1] - 1) / job.group[1];
  msl_emu_group& g = w.group;
  w.group_index = index;
  g.position[0] = u32(index % tx);
  g.position[1] = u32(index / tx % ty);
  g.position[2] = u32(index / tx / ty);
  u32 n = 1;
  for (int d = 0; d < 3; d++) {
    u32 left = job.grid[d] - g.position[d] * job.group[d];
    g.size[d] = left < job.group[d] ? left : job.group[d];
    n *= g.size[d];
  }
  if (w.n != n || memcmp(w.shape, g.size, sizeof w.shape) != 0) {
    memcpy(w.shape, g.size, sizeof w.shape);
    w.positions.resize(n);
    for (u32 i = 0; i < n; i++) {
      w.positions[i] = {i % g.size[0], i / g.size[0] % g.size[1], i / g.size[0] / g.size[1], i};
    }
    w.order.resize(n);
    for (u32 i = 0; i < n; i++) w.order[i] = w.how == kForward ? n - 1 - i : i;  // the last one starts
  }
  w.n = n;
  w.done = w.early = w.at_barrier = 0;
  w.epoch++;
  w.device_epoch++;
  w.group_start = w.epoch;
  u32 simds = (n + 31) / 32;
  for (u32 s = 0; s < simds; s++) {
    w.simds[s].alive = s + 1 < simds ? 32 : n - s * 32;
    w.simds[s].arrived = 0;
  }
  for (u32 i = 0; i < n; i++) w.lanes[i].state = kNew;
  if (w.how == kRandom) {
    for (u32 i = n; i > 1; i--) std::swap(w.order[i - 1], w.order[w.next_random() % i]);
  }
  w.stack.assign(w.order.begin(), w.order.end());
  u32 first = w.stack.back();
  w.stack.pop_back();
  go(w, &w.scheduler, first);
  if (w.done != n) stuck(w);
  w.counts.threads += n;
}

static u64 gcd(u64 a, u64 b) { return b ? gcd(b, a % b) : a; }

static long long nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static void* work(void* worker) {
  Worker* w = static_cast<Worker*>(worker);
  const Run* run = &job.runs[current_run];
  W = w;
  std::vector<char> alternate(65536);
  stack_t ss{};
  ss.ss_sp = alternate.data();
  ss.ss_size = alternate.size();
  sigaltstack(&ss, nullptr);
  const u64 total = u64((job.grid[0] + job.group[0] - 1) / job.group[0]) *
                    ((job.grid[1] + job.group[1] - 1) / job.group[1]) *
                    ((job.grid[2] + job.group[2] - 1) / job.group[2]);
  u64 step = 1;
  if (run->order == kRandom && total > 2) {
    step = (job.seed * 0x9e3779b97f4a7c15ull | 1) % total;
    while (step == 0 || gcd(step, total) != 1) step = (step + 1) % total;
  }
  u64 chunk = total / (u64(job.threads) * 16);
  chunk = chunk < 1 ? 1 : chunk > 64 ? 64 : chunk;
  for (;;) {
    u64 begin = next_group.fetch_add(chunk);
    if (begin >= total) break;
    u64 end = begin + chunk < total ? begin + chunk : total;
    for (u64 i = begin; i < end; i++) {
      u64 index = run->order == kForward ? i : run->order == kReverse ? total - 1 - i
                  : u64((unsigned __int128)i * step % total);
      run_group(*w, index);
    }
  }
  ss.ss_flags = SS_DISABLE;
  sigaltstack(&ss, nullptr);
  W = nullptr;
  return nullptr;
}

static void prepare(Worker& w, u32 id) {
  w.id = id;
  u32 most = job.group[0] * job.group[1] * job.group[2];
  w.lanes.resize(most);
  w.simds.resize((most + 31) / 32);
  size_t each = job.stack + kGuard;
  char* base = static_cast<char*>(
      mmap(nullptr, each * most, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0));
  if (base == MAP_FAILED) broken("no memory for stacks");
  w.fibers.resize(most);
  for (u32 i = 0; i < most; i++) {
    char* low = base + each * i + kGuard;
    if (mprotect(low, job.stack, PROT_READ | PROT_WRITE) != 0) broken("no memory for stacks");
    // Staggered tops, or the frames of all fibers would share one cache set.
    w.fibers[i].low = low;
  }
}
// Before each run, as another OS thread may drive this worker then.
static void reset_fibers(Worker& w) {
  w.free.clear();
  for (u32 i = u32(w.fibers.size()); i-- > 0;) {
    Fiber& f = w.fibers[i];
    f.sp = first_frame(f.low + job.stack - (i * 320) % 4096 - 64, fiber_main);
    w.free.push_back(&f);
  }
}

static void fill(Buffer& b, const Run& run) {
  if (b.mapped_bytes) unmap_slot(b.mapped, b.mapped_bytes);
  b.data = map_slot(b.slot, slot_shift, b.bytes, run.flush_end, &b.mapped, &b.mapped_bytes);
  if (!b.mapped_bytes) return;
  if (b.role == kOutput) {
    memset(b.mapped, run.poison, b.mapped_bytes);
    if (!b.init.empty()) {
      for (size_t i = 0; i < b.bytes; i++) b.data[i] = char(b.init[i % b.init.size()]);
    }
    if (job.checked) {
      size_t elements = b.bytes / b.element;
      if (b.writers) munmap(static_cast<void*>(b.writers), elements * 8);
      void* p = mmap(nullptr, elements * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
      if (p == MAP_FAILED) broken("no memory for the shadow of an output");
      b.writers = static_cast<std::atomic<u64>*>(p);
    }
    return;
  }
  int fd = open(b.file.c_str(), O_RDONLY);
  if (fd < 0) broken("cannot open an input file");
  size_t done = 0;
  while (done < b.bytes) {
    ssize_t k = read(fd, b.data + done, b.bytes - done);
    if (k <= 0) broken("an input file is short");
    done += size_t(k);
  }
  close(fd);
  mprotect(b.mapped, b.mapped_bytes, PROT_READ);
}

// What can only be seen after a run: bytes beside an output that changed, elements that nobody wrote.
static void inspect(u32 index, const Run& run) {
  Buffer& b = job.buffers[index];
  if (b.role != kOutput || !b.mapped_bytes) return;
  auto poison = char(run.poison);
  for (char* p = b.mapped; p < b.mapped + b.mapped_bytes; p++) {
    if (p == b.data) p += b.bytes;
    if (p >= b.mapped + b.mapped_bytes) break;
    if (*p != poison) bad_device("out_of_bounds_write", index, p - b.data, 0, 0, 0, 0);
  }
  if (job.checked && b.init.empty()) {
    size_t unset = 0, first = 0, n = b.bytes / b.element;
    for (size_t e = 0; e < n; e++) {
      if (b.writers[e].load(std::memory_order_relaxed) == 0 && unset++ == 0) first = e;
    }
    if (unset) {
      Report r;
      r.add("error unwritten\nbuffer %u\nelement %zu\ncount %zu\nof %zu\n", index, first, unset, n);
      stop(r);
    }
  }
}
static void compare(u32 index, const Run& first, u32 number, const Run& now) {
  Buffer& b = job.buffers[index];
  if (b.role != kOutput || !b.bytes) return;
  if (b.first.empty()) {
    b.first.assign(b.data, b.data + b.bytes);
    return;
  }
  if (memcmp(b.first.data(), b.data, b.bytes) == 0) return;
  // Elements that hold each run's own poison were not written.
  size_t n = b.bytes / b.element, unset = 0, unset_first = 0, differ = 0, differ_first = 0;
  for (size_t e = 0; e < n; e++) {
    const u8* p = b.first.data() + e * b.element;
    auto* q = reinterpret_cast<u8*>(b.data) + e * b.element;
    if (memcmp(p, q, b.element) == 0) continue;
    bool poisoned = b.init.empty();
    for (size_t k = 0; k < b.element; k++) poisoned = poisoned && p[k] == first.poison && q[k] == now.poison;
    if (poisoned) {
      if (unset++ == 0) unset_first = e;
    } else if (differ++ == 0) {
      differ_first = e;
    }
  }
  Report r;
  if (unset) {
    r.add("error unwritten\nbuffer %u\nelement %zu\ncount %zu\nof %zu\n", index, unset_first, unset, n);
    stop(r);
  }
  if (job.atomic) return;
  r.add("error unstable\nbuffer %u\nelement %zu\ncount %zu\nof %zu\nfirst_run 0\nsecond_run %u\n", index, differ_first,
        differ, n, number);
  stop(r);
}

static bool read_job(const char* path) {
  FILE* f = fopen(path, "r");
  if (!f) return false;
  static char key[64], text[4096];
  while (fscanf(f, "%63s", key) == 1) {
    std::string k = key;
    auto number = [&] {
      unsigned long long v = 0;
      if (fscanf(f, "%llu", &v) != 1) broken("bad job file");
      return v;
    };
    auto word = [&] {
      // A path: the rest of the line.
      if (fscanf(f, " %4095[^\n]", text) != 1) broken("bad job file");
      return std::string(text);
    };
    if (k == "kernel") job.kernel = word();
    else if (k == "report") job.report = word();
    else if (k == "threads") job.threads = u32(number());
    else if (k == "grid") for (auto& g : job.grid) g = u32(number());
    else if (k == "group") for (auto& g : job.group) g = u32(number());
    else if (k == "checked") job.checked = number() != 0;
    else if (k == "count_blocks") job.count_blocks = number() != 0;
    else if (k == "allow_early") job.allow_early = number() != 0;
    else if (k == "atomic") job.atomic = number() != 0;
    else if (k == "timeout") job.timeout = u32(number());
    else if (k == "seed") job.seed = number();
    else if (k == "stack") job.stack = size_t(number());
    else if (k == "buffer") {
      Buffer b;
      b.role = Role(number());
      b.element = size_t(number());
      b.bytes = size_t(number());
      size_t init = size_t(number());
      for (size_t i = 0; i < init; i++) b.init.push_back(u8(number()));
      b.file = word();
      job.buffers.push_back(std::move(b));
    } else if (k == "run") {
      Run r;
      r.order = Order(number());
      r.flush_end = number() != 0;
      r.poison = u8(number());
      job.runs.push_back(r);
    } else broken("bad job file");
  }
  fclose(f);
  return !job.runs.empty();
}

int main(int argc, char** argv) {
  if (argc != 2 || !read_job(argv[1])) return 2;
  page = size_t(sysconf(_SC_PAGESIZE));
  for (slot_shift = 38; slot_shift >= 30; slot_shift -= 2) {
    region_bytes = (job.buffers.size() + 1) << slot_shift;
    void* p = mmap(nullptr, region_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (p != MAP_FAILED) {
      region = static_cast<char*>(p);
      break;
    }
  }
  local_bytes = size_t(job.threads) * kMaxVariables << kVariableShift;
  void* local = mmap(nullptr, local_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (!region || local == MAP_FAILED) broken("no address space");
  local_region = static_cast<char*>(local);
  for (size_t i = 0; i < job.buffers.size(); i++) job.buffers[i].slot = region + (i << slot_shift);

  void* handle = dlopen(job.kernel.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) broken(dlerror());
  entry = reinterpret_cast<Entry>(dlsym(handle, "msl_emu_entry"));
  Dl_info info;
  if (!entry || !dladdr(reinterpret_cast<void*>(entry), &info)) broken("the kernel has no entry");
  kernel_base = static_cast<char*>(info.dli_fbase);
  if (job.count_blocks) {
    FILE* f = fopen(job.kernel.c_str(), "r");
    if (!f) broken("cannot open the kernel");
    fseek(f, 0, SEEK_END);
    kernel_bytes = size_t(ftell(f));
    fclose(f);
  }

  struct sigaction sa {};
  sa.sa_sigaction = on_signal;
  sa.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int s : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGALRM}) sigaction(s, &sa, nullptr);
  if (job.timeout) alarm(job.timeout);

  std::vector<Worker> workers(job.threads);
  for (u32 i = 0; i < job.threads; i++) {
    prepare(workers[i], i);
    if (job.count_blocks) workers[i].blocks.resize(kernel_bytes);
  }
  Report times;
  u32 number = 0;
  for (const Run& run : job.runs) {
    current_run = number;
    for (auto& b : job.buffers) fill(b, run);
    for (auto& w : workers) {
      w.buffers.clear();
      for (auto& b : job.buffers) w.buffers.push_back(b.data);
      w.how = run.order;
      w.poison = run.poison;
      w.flush_end = run.flush_end;
      w.n = 0;
      for (int d = 0; d < 3; d++) {
        w.group.nominal[d] = job.group[d];
        w.group.grid[d] = job.grid[d];
        w.group.groups[d] = (job.grid[d] + job.group[d] - 1) / job.group[d];
      }
      reset_fibers(w);
      w.random = (job.seed + 1) * 0x9e3779b97f4a7c15ull ^ (u64(w.id + 1) << 32) ^ number;
      if (!w.random) w.random = 1;
      for (auto& v : w.variables) {
        if (v.mapped_bytes) unmap_slot(v.mapped, v.mapped_bytes);
        v = Variable();
      }
      // Counts are those of one run.
      w.counts = Counts();
      std::fill(w.blocks.begin(), w.blocks.end(), 0);
    }
    next_group = 0;
    long long start = nanoseconds();
    std::vector<pthread_t> pool(job.threads - 1);
    for (u32 i = 1; i < job.threads; i++) {
      if (pthread_create(&pool[i - 1], nullptr, work, &workers[i]) != 0) broken("cannot start a thread");
    }
    work(&workers[0]);
    for (auto t : pool) pthread_join(t, nullptr);
    long long ns = nanoseconds() - start;
    times.add("time %lld\n", ns);
    for (u32 i = 0; i < job.buffers.size(); i++) inspect(i, run);
    for (u32 i = 0; i < job.buffers.size(); i++) compare(i, job.runs[0], number, run);
    number++;
  }

  for (auto& b : job.buffers) {
    if (b.role != kOutput) continue;
    FILE* f = fopen(b.file.c_str(), "w");
    if (!f || fwrite(b.data, 1, b.bytes, f) != b.bytes || fclose(f) != 0) broken("cannot write an output");
  }
  FILE* f = fopen(job.report.c_str(), "w");
  if (!f) return 2;
  fprintf(f, "ok\n%s", times.text);
  Counts total;
  size_t shared = 0;
  for (auto& w : workers) {
    auto* a = reinterpret_cast<u64*>(&total);
    auto* b = reinterpret_cast<u64*>(&w.counts);
    for (size_t i = 0; i < sizeof(Counts) / 8; i++) a[i] += b[i];
    size_t used = 0;
    for (auto& v : w.variables) used += v.bytes;
    shared = used > shared ? used : shared;
  }
#define COUNT(name) fprintf(f, #name " %llu\n", (unsigned long long)total.name);
  COUNT(device_loads) COUNT(device_load_bytes) COUNT(device_stores) COUNT(device_store_bytes) COUNT(constant_loads)
  COUNT(constant_load_bytes) COUNT(threadgroup_loads) COUNT(threadgroup_load_bytes) COUNT(threadgroup_stores)
  COUNT(threadgroup_store_bytes) COUNT(atomics) COUNT(barriers) COUNT(simdgroup_barriers) COUNT(simd_moves)
  COUNT(simd_reductions) COUNT(matrix_loads) COUNT(matrix_products) COUNT(threads)
  fprintf(f, "threadgroup_bytes %zu\n", shared);
  for (size_t i = 0; i < kernel_bytes; i++) {
    u64 n = 0;
    for (auto& w : workers) n += w.blocks[i];
    if (n) fprintf(f, "block 0x%zx %llu\n", i, (unsigned long long)n);
  }
  return fclose(f) == 0 ? 0 : 2;
}

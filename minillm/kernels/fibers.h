// Fibers: many stacks, one processor. What cuda_on_cpu.h runs CUDA threads on.
//
// To switch is to keep the registers that a function call must preserve on the old stack, to exchange the stack pointer,
// and to take the registers from the new stack. The switch returns to where the new stack was left: some nanoseconds,
// where a switch of OS threads takes microseconds.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#if defined(CUDA_ON_CPU_UCONTEXT) || !(defined(__x86_64__) || defined(__aarch64__))
#include <ucontext.h>
#endif
#if defined(__has_feature)  // clang's way to say what g++ says by a macro
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#endif

namespace cuda_on_cpu {

#if defined(__x86_64__) && !defined(CUDA_ON_CPU_UCONTEXT)
extern "C" void cuda_on_cpu_switch(void** save, void* load) asm("cuda_on_cpu_switch");
asm(".text\n"
    "cuda_on_cpu_switch:\n"
    "  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15\n"
    "  mov %rsp, (%rdi); mov %rsi, %rsp\n"
    "  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp\n"
    "  pop %rcx; jmp *%rcx\n");  // and not ret, which the processor would predict to go where it came from
inline void* first_frame(char* top, void (*entry)()) {
  void** frame = reinterpret_cast<void**>(top) - 8;  // six registers, where to go, where entry would return to
  std::fill_n(frame, 8, nullptr);
  frame[6] = reinterpret_cast<void*>(entry);
  return frame;
}
#elif defined(__aarch64__) && !defined(CUDA_ON_CPU_UCONTEXT)
extern "C" void cuda_on_cpu_switch(void** save, void* load) asm("cuda_on_cpu_switch");
asm(".text\n"
    ".balign 4\n"
    "cuda_on_cpu_switch:\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n");
inline void* first_frame(char* top, void (*entry)()) {
  void** frame = reinterpret_cast<void**>(top) - 20;
  std::fill_n(frame, 20, nullptr);
  frame[11] = reinterpret_cast<void*>(entry);  // x30, the link register
  return frame;
}
#else  // everywhere else, 20 times slower: it saves the signal mask, too, by a system call
inline void cuda_on_cpu_switch(void** save, void* load) {
  ucontext_t here;
  *save = &here;
  swapcontext(&here, static_cast<ucontext_t*>(load));
}
inline void* first_frame(char* top, void (*entry)()) {
  auto* context = new (top - (sizeof(ucontext_t) + 63) / 64 * 64) ucontext_t;  // at the top of the stack itself
  getcontext(context);
  context->uc_stack.ss_size = 48 << 10;
  context->uc_stack.ss_sp = reinterpret_cast<char*>(context) - context->uc_stack.ss_size;
  makecontext(context, entry, 0);
  return context;
}
#endif

// What the sanitizers must be told. ASan: which stack runs now. TSan: which threads there are, and which waits order
// their accesses to memory; a plain switch must not count as one.
#if defined(__SANITIZE_ADDRESS__)
extern "C" void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
extern "C" void __sanitizer_finish_switch_fiber(void* fake_stack, const void** old_bottom, size_t* old_size);
extern "C" void __asan_unpoison_memory_region(const volatile void* address, size_t size);
#elif defined(__SANITIZE_THREAD__)
extern "C" void* __tsan_create_fiber(unsigned flags);
extern "C" void* __tsan_get_current_fiber();
extern "C" void __tsan_switch_to_fiber(void* fiber, unsigned flags);
extern "C" void __tsan_acquire(void* event);
extern "C" void __tsan_release(void* event);
extern "C" void AnnotateIgnoreReadsBegin(const char*, int);
extern "C" void AnnotateIgnoreReadsEnd(const char*, int);
extern "C" void AnnotateIgnoreWritesBegin(const char*, int);
extern "C" void AnnotateIgnoreWritesEnd(const char*, int);
#endif

#if defined(__SANITIZE_THREAD__)
inline void watch(bool on) {  // the simulator's own bookkeeping is no race of the kernel's
  on ? AnnotateIgnoreReadsEnd("", 0) : AnnotateIgnoreReadsBegin("", 0);
  on ? AnnotateIgnoreWritesEnd("", 0) : AnnotateIgnoreWritesBegin("", 0);
}
inline void happens_before(void* event) { __tsan_release(event); }  // all that this thread did so far
inline void happens_after(void* event) { __tsan_acquire(event); }
#else
inline void watch(bool) {}
inline void happens_before(void*) {}
inline void happens_after(void*) {}
#endif

class Fiber {
 public:
  explicit Fiber(unsigned number = 0) {
    size_t page = sysconf(_SC_PAGESIZE);
    void* memory = mmap(nullptr, STACK_BYTES + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory, page, PROT_NONE);  // an overflow ends here, and not in the neighbour's stack
    stack_ = static_cast<char*>(memory) + page;
    top_ = stack_ + STACK_BYTES - number % 32 * 128;  // else the tops of all stacks would share a few cache lines
#if defined(__SANITIZE_THREAD__)
    sanitizer_ = __tsan_create_fiber(0);
#endif
  }

  // From the main stack: run entry, or go on where it was left, until it calls leave().
  void enter(void (*entry)()) {
    if (!stack_pointer_) {
#if defined(__SANITIZE_ADDRESS__)
      __asan_unpoison_memory_region(stack_, STACK_BYTES);  // of one that was abandoned
#endif
      stack_pointer_ = first_frame(top_, entry);
    }
    void* to = stack_pointer_;
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack;
    __sanitizer_start_switch_fiber(&fake_stack, stack_, STACK_BYTES);
#elif defined(__SANITIZE_THREAD__)
    main_sanitizer_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(sanitizer_, 1);
#endif
    cuda_on_cpu_switch(&main_stack_pointer_, to);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  }

  void entered() {  // what entry must call first
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &main_bottom_, &main_size_);
#endif
  }

  void leave() {  // back to the main stack
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack;
    __sanitizer_start_switch_fiber(&fake_stack, main_bottom_, main_size_);
#elif defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(main_sanitizer_, 1);
#endif
    cuda_on_cpu_switch(&stack_pointer_, main_stack_pointer_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, &main_bottom_, &main_size_);
#endif
  }

  void abandon() { stack_pointer_ = nullptr; }  // it will never go on: next time it starts anew

 private:
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  static constexpr size_t STACK_BYTES = 256 << 10;
#else
  static constexpr size_t STACK_BYTES = 64 << 10;
#endif
  char *stack_, *top_;
  void *stack_pointer_ = nullptr, *main_stack_pointer_ = nullptr;
  void* sanitizer_ = nullptr;
  void* main_sanitizer_ = nullptr;
  const void* main_bottom_ = nullptr;
  size_t main_size_ = 0;
};

}  // namespace cuda_on_cpu

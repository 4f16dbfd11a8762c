#include "metal_sim/crash_guard.h"

#include <signal.h>
#include <ucontext.h>

#include <array>
#include <cstddef>
#include <memory>
#include <mutex>

#include "metal_sim/simulation.h"

namespace metal_sim {
namespace {

/// Signals of accesses without memory, and of the trap instructions that check bounds.
constexpr std::array<int, 4> kSignals = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP};

struct Handlers {
  std::mutex mutex;
  int guards = 0;
  std::array<struct sigaction, kSignals.size()> before{};
};

Handlers& All() {
  static auto* const handlers = new Handlers;
  return *handlers;
}

thread_local CrashSite crashed;

void CrashOnSpareStack() { Simulation::Current()->Crash(crashed); }

/// Makes the thread go on in CrashOnSpareStack when the handler returns. Returns where it was.
const void* Redirect(ucontext_t* context, std::byte* stack_top) {
  const auto function = reinterpret_cast<uintptr_t>(&CrashOnSpareStack);
  const auto top = reinterpret_cast<uintptr_t>(stack_top) & ~uintptr_t{63};
#if defined(__x86_64__)
  auto& registers = context->uc_mcontext.gregs;
  const auto was = static_cast<uintptr_t>(registers[REG_RIP]);
  registers[REG_RIP] = static_cast<greg_t>(function);
  // As after a call: the return address, which is never used, is on the stack.
  registers[REG_RSP] = static_cast<greg_t>(top - 64 - sizeof(void*));
#elif defined(__aarch64__)
  const uintptr_t was = context->uc_mcontext.pc;
  context->uc_mcontext.pc = function;
  context->uc_mcontext.sp = top - 64;
#else
#error "metal_sim: needs x86-64 or AArch64"
#endif
  // Sites are return addresses: past the instruction.
  return reinterpret_cast<const void*>(was + 1);  // NOLINT(performance-no-int-to-ptr)
}

void PassOn(int signal, siginfo_t* info, void* context) {
  Handlers& handlers = All();
  for (size_t i = 0; i < kSignals.size(); ++i) {
    if (kSignals[i] != signal) continue;
    const struct sigaction& before = handlers.before[i];
    if ((before.sa_flags & SA_SIGINFO) != 0) {
      before.sa_sigaction(signal, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
      before.sa_handler(signal);
    } else {
      sigaction(signal, &before, nullptr);  // The instruction is repeated, and ends the process.
    }
  }
}

void Handle(int signal, siginfo_t* info, void* context) {
  const Simulation* const current = Simulation::Current();
  if (current == nullptr || !current->IsOnFiber()) return PassOn(signal, info, context);
  const bool trap = signal == SIGILL || signal == SIGTRAP;
  crashed.cause = trap ? CrashSite::Cause::kBounds : CrashSite::Cause::kMemory;
  crashed.site = Redirect(static_cast<ucontext_t*>(context), current->SpareStack());
}

/// The stack of handlers: a thread may be out of its own. Left to the thread.
void MakeSignalStack() {
  constexpr size_t kBytes = size_t{64} << 10;
  thread_local std::unique_ptr<std::byte[]> memory;
  stack_t now = {};
  const bool has = sigaltstack(nullptr, &now) == 0 && (now.ss_flags & SS_DISABLE) == 0;
  if (has) return;
  if (memory == nullptr) memory = std::make_unique<std::byte[]>(kBytes);
  stack_t stack = {};
  stack.ss_sp = memory.get();
  stack.ss_size = kBytes;
  sigaltstack(&stack, nullptr);
}

}  // namespace

CrashGuard::CrashGuard() {
  MakeSignalStack();
  Handlers& handlers = All();
  const std::lock_guard<std::mutex> lock(handlers.mutex);
  if (handlers.guards++ > 0) return;
  struct sigaction action = {};
  action.sa_sigaction = Handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], &action, &handlers.before[i]);
  }
}

CrashGuard::~CrashGuard() {
  Handlers& handlers = All();
  const std::lock_guard<std::mutex> lock(handlers.mutex);
  if (--handlers.guards > 0) return;
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], &handlers.before[i], nullptr);
  }
}

}  // namespace metal_sim

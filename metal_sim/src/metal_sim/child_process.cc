#include "metal_sim/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

extern char** environ;

namespace metal_sim {
namespace {

/// A pipe whose ends close themselves.
class Pipe {
 public:
  Pipe() = default;
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  ~Pipe() {
    Close(0);
    Close(1);
  }
  bool Open() { return pipe2(ends_.data(), O_CLOEXEC) == 0; }
  int end(size_t i) const { return ends_[i]; }
  void Close(size_t i) {
    if (ends_[i] >= 0) close(ends_[i]);
    ends_[i] = -1;
  }

 private:
  std::array<int, 2> ends_ = {-1, -1};
};

/// Reads the bytes that are available; false at the end.
bool ReadSome(int from, std::string* to) {
  std::array<char, 65536> buffer;
  const ssize_t count = read(from, buffer.data(), buffer.size());
  if (count > 0) to->append(buffer.data(), static_cast<size_t>(count));
  return count > 0 || (count < 0 && errno == EINTR);
}

/// Reads both pipes until both end: a child that fills one must not wait for the other.
void ReadBoth(Pipe* out, Pipe* error, ChildOutput* output) {
  std::array<pollfd, 2> polled = {pollfd{out->end(0), POLLIN, 0}, pollfd{error->end(0), POLLIN, 0}};
  const std::array<std::string*, 2> texts = {&output->out, &output->error};
  while (polled[0].fd >= 0 || polled[1].fd >= 0) {
    if (poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) return;
    for (size_t i = 0; i < polled.size(); ++i) {
      if (polled[i].fd < 0 || polled[i].revents == 0) continue;
      // A negative descriptor is not polled any more.
      if (!ReadSome(polled[i].fd, texts[i])) polled[i].fd = -1;
    }
  }
}

int WaitFor(pid_t child) {
  int state = 0;
  while (waitpid(child, &state, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(state) ? WEXITSTATUS(state) : 128 + WTERMSIG(state);
}

}  // namespace

Result<ChildOutput> RunChild(const std::vector<std::string>& arguments) {
  const auto failed = [&](int why) {
    return Status(Code::kIo, arguments[0] + ": cannot be started: " + std::strerror(why));
  };
  Pipe out;
  Pipe error;
  if (!out.Open() || !error.Open()) return failed(errno);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, out.end(1), 1);
  posix_spawn_file_actions_adddup2(&actions, error.end(1), 2);
  std::vector<char*> argv;
  argv.reserve(arguments.size() + 1);
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  pid_t child = 0;
  const int started = posix_spawnp(&child, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (started != 0) return failed(started);
  out.Close(1);
  error.Close(1);
  ChildOutput output;
  ReadBoth(&out, &error, &output);
  output.exit_code = WaitFor(child);
  return output;
}

}  // namespace metal_sim

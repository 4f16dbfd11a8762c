// Continues a prompt with a model: run_cpp MODEL [DEVICE] < token ids. Prints token ids.
#include <marlin/marlin.h>

#include <cstdint>
#include <cstdio>
#include <iostream>
#include <vector>

int main(int count, char** arguments) {
  if (count < 2) {
    std::fprintf(stderr, "usage: run_cpp MODEL [DEVICE] < token ids\n");
    return 2;
  }
  std::vector<int32_t> prompt;
  for (int32_t token = 0; std::cin >> token;) prompt.push_back(token);
  if (!std::cin.eof()) {
    std::fprintf(stderr, "stdin: expected token ids\n");
    return 1;
  }

  const auto device = marlin::Device::Open(count > 2 ? arguments[2] : "auto");
  if (!device.ok()) {
    std::fprintf(stderr, "%s\n", device.status().message().c_str());
    return 1;
  }
  const auto model = marlin::Model::Open(arguments[1], *device);
  if (!model.ok()) {
    std::fprintf(stderr, "%s\n", model.status().message().c_str());
    return 1;
  }
  // The sampling that the model's generation_config.json asks for; otherwise greedy.
  const marlin::GenerateOptions options = {.max_tokens = 24, .sampling = model->info().sampling};
  // A token at a time, as it is generated. False ends generation: the output cannot be written.
  const auto print = [](int32_t token) {
    std::printf("%d\n", token);
    return std::fflush(stdout) == 0;
  };
  const auto text = marlin::Generate(*model, prompt, options, print);
  if (!text.ok()) {
    std::fprintf(stderr, "%s\n", text.status().message().c_str());
    return 1;
  }
  if (text->stop_reason == marlin::StopReason::kCallback) {
    std::fprintf(stderr, "stdout: cannot be written\n");
    return 1;
  }
  const auto name = marlin::StopReasonName(text->stop_reason);
  std::fprintf(stderr, "%zu tokens on %s, ended by %.*s\n", text->token_ids.size(),
               model->device().info().name.c_str(), static_cast<int>(name.size()), name.data());
  return 0;
}

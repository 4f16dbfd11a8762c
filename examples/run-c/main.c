/* Continues a prompt with a model and computes the prompt's perplexity: run_c MODEL [DEVICE] <
 * token ids. Prints token ids. */
#include <marlin/marlin_c_model.h>
#include <stdio.h>

enum { kMostTokens = 4096 };

static int Fail(const char* what, marlin_code code) {
  fprintf(stderr, "%s: error %d: %s\n", what, (int)code, marlin_last_error());
  return 1;
}

/* Prints a token as it is generated. 0 ends generation: here, when the output cannot be written. */
static int32_t PrintToken(void* context, int32_t token) {
  fprintf((FILE*)context, "%d\n", (int)token);
  return fflush((FILE*)context) == 0;
}

static int Run(const marlin_model* model, const int32_t* prompt, int64_t count) {
  /* The sampling that the model's generation_config.json asks for; otherwise greedy. */
  marlin_generate_options options = MARLIN_GENERATE_OPTIONS_INIT;
  marlin_code code = marlin_model_get_generate_options(model, &options);
  if (code != MARLIN_OK) return Fail("options", code);
  options.max_tokens = 24;
  marlin_generated generated = MARLIN_GENERATED_INIT;
  code = marlin_model_generate(model, prompt, count, &options, &PrintToken, stdout, &generated);
  if (code != MARLIN_OK) return Fail("generate", code);
  if (generated.stop_reason == MARLIN_STOP_CALLBACK) {
    fprintf(stderr, "stdout: cannot be written\n");
    return 1;
  }

  marlin_perplexity perplexity = MARLIN_PERPLEXITY_INIT;
  code = marlin_model_perplexity(model, prompt, count, NULL, &perplexity);
  if (code != MARLIN_OK) return Fail("perplexity", code);
  fprintf(stderr, "%d tokens on %s; perplexity of the prompt %.2f\n", (int)generated.tokens,
          marlin_model_device_name(model), perplexity.perplexity);
  return 0;
}

int main(int count, char** arguments) {
  static int32_t prompt[kMostTokens];
  int64_t tokens = 0;
  if (count < 2) {
    fprintf(stderr, "usage: run_c MODEL [DEVICE] < token ids\n");
    return 2;
  }
  for (int token; tokens < kMostTokens && scanf("%d", &token) == 1;) prompt[tokens++] = token;
  if (!feof(stdin) && scanf(" %*c") != EOF) {
    fprintf(stderr, "stdin: expected at most %d token ids\n", kMostTokens);
    return 1;
  }

  marlin_device* device = NULL;
  marlin_model* model = NULL;
  int failed = 0;
  marlin_code code = marlin_device_open(count > 2 ? arguments[2] : "auto", 0, &device);
  if (code != MARLIN_OK) {
    failed = Fail("device", code);
  } else if ((code = marlin_model_open(arguments[1], device, NULL, &model)) != MARLIN_OK) {
    failed = Fail("model", code);
  } else {
    failed = Run(model, prompt, tokens);
  }
  marlin_model_destroy(model);
  marlin_device_destroy(device);
  return failed;
}

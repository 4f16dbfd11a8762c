#include <marlin/marlin_c.h>
#include <math.h>
#include <stdio.h>

enum { kIn = 512, kOut = 256 };

static float layer[kIn][kOut];
static float input[kIn];
static float bias[kOut];
static float output[kOut];

static int Fail(const char* what) {
  fprintf(stderr, "%s: %s\n", what, marlin_last_error());
  return 1;
}

/* Quantizes a layer [in, out], prepares it for the CPU and runs a GEMM with m = 1. */
static int Run(marlin_device** device, marlin_weights** weights, marlin_prepared** prepared,
               marlin_plan** plan) {
  marlin_tensor dense = MARLIN_TENSOR_INIT;
  dense.data = layer;
  dense.rank = 2;
  dense.shape[0] = kIn;
  dense.shape[1] = kOut;
  if (marlin_quantize(&dense, "fp4_e2m1/g64", weights) != MARLIN_OK) return Fail("quantize");
  if (marlin_device_open("cpu", 0, device) != MARLIN_OK) return Fail("device");
  if (marlin_prepare(*weights, *device, prepared) != MARLIN_OK) return Fail("prepare");

  /* Plan once, run as often as needed. */
  marlin_gemm_problem problem = MARLIN_GEMM_PROBLEM_INIT;
  problem.m = 1;
  problem.a_type = MARLIN_F32;
  problem.out_type = MARLIN_F32;
  problem.activation = MARLIN_ACTIVATION_SILU;
  if (marlin_plan_gemm(*device, *prepared, &problem, plan) != MARLIN_OK) return Fail("plan");

  marlin_tensor a = MARLIN_TENSOR_INIT;
  a.data = input;
  a.rank = 2;
  a.shape[0] = 1;
  a.shape[1] = kIn;
  marlin_tensor out = MARLIN_TENSOR_INIT;
  out.data = output;
  out.rank = 2;
  out.shape[0] = 1;
  out.shape[1] = kOut;
  marlin_tensor bias_view = MARLIN_TENSOR_INIT;
  bias_view.data = bias;
  bias_view.rank = 1;
  bias_view.shape[0] = kOut;
  marlin_gemm_arguments arguments = MARLIN_GEMM_ARGUMENTS_INIT;
  arguments.bias = &bias_view;
  if (marlin_plan_run(*plan, &a, &out, &arguments) != MARLIN_OK) return Fail("run");
  printf("marlin %s, %s (%s), output[0] = %.4f\n", marlin_version(), marlin_plan_kernel(*plan),
         marlin_plan_accuracy(*plan), (double)output[0]);
  return 0;
}

int main(void) {
  for (int i = 0; i < kIn; ++i) {
    input[i] = 1.0f;
    for (int o = 0; o < kOut; ++o) layer[i][o] = sinf((float)(i + o * kIn));
  }
  for (int o = 0; o < kOut; ++o) bias[o] = 0.5f;
  marlin_device* device = NULL;
  marlin_weights* weights = NULL;
  marlin_prepared* prepared = NULL;
  marlin_plan* plan = NULL;
  const int code = Run(&device, &weights, &prepared, &plan);
  marlin_plan_destroy(plan);
  marlin_prepared_destroy(prepared);
  marlin_weights_destroy(weights);
  marlin_device_destroy(device);
  return code;
}

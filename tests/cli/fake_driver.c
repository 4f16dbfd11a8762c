// Stands in for NVIDIA's driver, libcuda.so.1, on a machine with any driver or none: it is for the
// version of CUDA that FAKE_VERSION says, and finds no device (100, or the error in FAKE_INIT).
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int Setting(const char* name, int otherwise) {
  const char* const value = getenv(name);
  return value == NULL ? otherwise : atoi(value);
}

int cuDriverGetVersion(int* version) {
  *version = Setting("FAKE_VERSION", 13000);
  return 0;
}

int cuInit(unsigned flags) {
  (void)flags;
  return Setting("FAKE_INIT", 100);
}

static int NoDevice(void) { return 100; }

int cuGetExportTable(const void** table, const void* id) {
  (void)table;
  (void)id;
  return 100;
}

// The runtime asks for every function by it.
int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* found) {
  (void)version;
  (void)flags;
  *function = (void*)NoDevice;
  if (strcmp(name, "cuInit") == 0) *function = (void*)cuInit;
  if (strcmp(name, "cuDriverGetVersion") == 0) *function = (void*)cuDriverGetVersion;
  if (strcmp(name, "cuGetProcAddress") == 0) *function = (void*)cuGetProcAddress_v2;
  if (found != NULL) *found = 0;
  return 0;
}

int cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

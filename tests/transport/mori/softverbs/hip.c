/* Stands for libamdhip64 on a machine without a GPU: what is not needed to load the library fails as HIP fails with
 * no device. */
#include <stddef.h>
#include <stdint.h>

#define STUB(name, ...) name(__VA_ARGS__)
enum { OK = 0, INVALID_VALUE = 1, NO_DEVICE = 100 };

int STUB(hipGetDeviceCount, int *n) {
  *n = 0;
  return NO_DEVICE;
}
int STUB(hipGetDevice, int *d) {
  *d = -1;
  return NO_DEVICE;
}
int STUB(hipSetDevice, int d) {
  (void)d;
  return NO_DEVICE;
}
int STUB(hipGetLastError, void) {
  return OK;
}
const char *STUB(hipGetErrorString, int e) {
  return e == OK ? "no error" : "no ROCm-capable device is detected (stub)";
}
int STUB(hipRuntimeGetVersion, int *v) {
  *v = 70200000;
  return OK;
}
/* host memory is unknown to HIP */
int STUB(hipPointerGetAttributes, void *a, const void *p) {
  (void)a;
  (void)p;
  return INVALID_VALUE;
}
int STUB(hipDeviceGetPCIBusId, char *s, int n, int d) {
  (void)d;
  if (n > 0)
    s[0] = 0;
  return NO_DEVICE;
}
static void *fatbin[4];
void **STUB(__hipRegisterFatBinary, const void *d) {
  (void)d;
  return fatbin;
}
void STUB(__hipRegisterFunction, void **m) {
  (void)m;
}
void STUB(__hipUnregisterFatBinary, void **m) {
  (void)m;
}

// Package fakecuda builds a libcuda.so.1 without a GPU, for tests, and controls it. The
// library, in C++ below driver, has the functions of NVIDIA's driver that engine/cuda calls,
// executes CUDA streams on threads and the kernels' own sources on the CPU, and refuses what
// a device would refuse: memory that is not there any more when an operation reaches it,
// above all. It knows no other functions, and does not predict how long a device takes.
//
// Only tests import it. Without cgo, or elsewhere than on Linux, it is empty. Bytes
// stay with who calls the library; this package never sees them.
package fakecuda

// The part of NVIDIA's driver API that the engine uses. It is written by hand: no
// CUDA header is needed to build, and nothing of CUDA is linked. The library is
// opened at run time and each function found by its name, whose suffix (_v2) is
// part of the binary interface.
#ifndef TENSORFERRY_CUDA_DRIVER_H
#define TENSORFERRY_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;

enum {
	CUDA_SUCCESS = 0,
	CUDA_ERROR_NOT_INITIALIZED = 3,

	CU_CTX_SCHED_BLOCKING_SYNC = 4,
	CU_STREAM_NON_BLOCKING = 1,
	CU_EVENT_BLOCKING_SYNC = 1,
	CU_EVENT_DISABLE_TIMING = 2,
	CU_MEMHOSTREGISTER_PORTABLE = 1,

	CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
	CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,

	CU_JIT_ERROR_LOG_BUFFER = 5,
	CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 6,
};

// X(field, symbol, parameters...)
#define TF_SYMBOLS(X) \
	X(Init, "cuInit", unsigned) \
	X(DriverGetVersion, "cuDriverGetVersion", int *) \
	X(GetErrorName, "cuGetErrorName", CUresult, const char **) \
	X(GetErrorString, "cuGetErrorString", CUresult, const char **) \
	X(DeviceGetCount, "cuDeviceGetCount", int *) \
	X(DeviceGet, "cuDeviceGet", CUdevice *, int) \
	X(DeviceGetName, "cuDeviceGetName", char *, int, CUdevice) \
	X(DeviceGetAttribute, "cuDeviceGetAttribute", int *, int, CUdevice) \
	X(DeviceTotalMem, "cuDeviceTotalMem_v2", size_t *, CUdevice) \
	X(DevicePrimaryCtxSetFlags, "cuDevicePrimaryCtxSetFlags_v2", CUdevice, unsigned) \
	X(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", CUcontext *, CUdevice) \
	X(DevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", CUdevice) \
	X(DevicePrimaryCtxReset, "cuDevicePrimaryCtxReset_v2", CUdevice) \
	X(CtxSetCurrent, "cuCtxSetCurrent", CUcontext) \
	X(StreamCreate, "cuStreamCreate", CUstream *, unsigned) \
	X(StreamDestroy, "cuStreamDestroy_v2", CUstream) \
	X(StreamSynchronize, "cuStreamSynchronize", CUstream) \
	X(StreamWaitEvent, "cuStreamWaitEvent", CUstream, CUevent, unsigned) \
	X(EventCreate, "cuEventCreate", CUevent *, unsigned) \
	X(EventDestroy, "cuEventDestroy_v2", CUevent) \
	X(EventRecord, "cuEventRecord", CUevent, CUstream) \
	X(EventSynchronize, "cuEventSynchronize", CUevent) \
	X(EventElapsedTime, "cuEventElapsedTime", float *, CUevent, CUevent) \
	X(MemAlloc, "cuMemAlloc_v2", CUdeviceptr *, size_t) \
	X(MemFree, "cuMemFree_v2", CUdeviceptr) \
	X(MemGetInfo, "cuMemGetInfo_v2", size_t *, size_t *) \
	X(MemHostRegister, "cuMemHostRegister_v2", void *, size_t, unsigned) \
	X(MemHostUnregister, "cuMemHostUnregister", void *) \
	X(MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", CUdeviceptr, const void *, size_t, CUstream) \
	X(MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", void *, CUdeviceptr, size_t, CUstream) \
	X(ModuleLoadDataEx, "cuModuleLoadDataEx", CUmodule *, const void *, unsigned, int *, void **) \
	X(ModuleGetFunction, "cuModuleGetFunction", CUfunction *, CUmodule, const char *) \
	X(ModuleUnload, "cuModuleUnload", CUmodule) \
	X(LaunchKernel, "cuLaunchKernel", CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **)

// tf_driver is an opened library.
typedef struct {
#define X(field, symbol, ...) CUresult (*field)(__VA_ARGS__);
	TF_SYMBOLS(X)
#undef X
} tf_driver;

// tf_result is how a call of the driver ended: its name and the driver's code, 0 for
// well.
typedef struct {
	const char *call;
	CUresult code;
} tf_result;

// tf_device is a device with a primary context and a stream for each of the three
// things that it does at the same time.
typedef struct {
	const tf_driver *driver;
	CUdevice ordinal;
	CUcontext context;
	CUstream h2d, compute, d2h;
	CUmodule module;
} tf_device;

// The events of a lane, in the order in which they come to pass. A block's input is
// free at TF_IN_END, its result there at TF_OUT_END.
enum { TF_IN_BEGIN, TF_IN_END, TF_RUN_BEGIN, TF_RUN_END, TF_OUT_BEGIN, TF_OUT_END, TF_EVENTS };

// tf_lane is what one block at a time has on the device.
typedef struct {
	CUdeviceptr memory;
	size_t bytes;
	int timed; // whether the block is, and so which events are its
	CUevent events[2][TF_EVENTS];
} tf_lane;

enum { TF_PARAMS = 12, TF_PARAM_BYTES = 96 };

// tf_launch is one launch of a kernel, its parameters by value.
typedef struct {
	CUfunction function;
	unsigned grid[3], block[3];
	unsigned params;               // how many
	unsigned offsets[TF_PARAMS];   // of each in bytes
	_Alignas(8) unsigned char bytes[TF_PARAM_BYTES];
} tf_launch;

enum { TF_INPUTS = 2 };

// tf_input is what comes in at one place of a lane's memory.
typedef struct {
	const void *from;
	size_t bytes, at;
} tf_input;

// tf_block is a block on its way through the device: its inputs come in, and its
// result goes out from another place of the lane's memory.
typedef struct {
	tf_input in[TF_INPUTS];
	void *out;
	size_t out_bytes, out_at;
	int timed;
} tf_block;

// tf_open opens a library. What is missing is written to why; nothing is returned then.
const tf_driver *tf_open(const char *library, char *why, size_t n);

// tf_text names a result code, such as "CUDA_ERROR_OUT_OF_MEMORY: out of memory".
void tf_text(const tf_driver *, CUresult, char *text, size_t n);

// All below are called on any thread, and make the device's context current on it.
tf_result tf_count(const tf_driver *, int *count, int *version);
tf_result tf_describe(const tf_driver *, int ordinal, char *name, int n, size_t *memory, int *major, int *minor);

tf_result tf_start(tf_device *);
tf_result tf_load(tf_device *, const char *ptx, char *log, size_t n);
tf_result tf_function(tf_device *, const char *entry, CUfunction *);
void tf_stop(tf_device *); // frees nothing that a lane has
void tf_reset(tf_device *); // frees everything in the context, a dead one's too

tf_result tf_lane_open(tf_device *, tf_lane *);
tf_result tf_lane_grow(tf_device *, tf_lane *, size_t bytes);
void tf_lane_close(tf_device *, tf_lane *);

// tf_submit has a block copied in, computed and copied out, and does not wait. When
// it fails, nothing touches the block's memory any more, unless the call that failed
// is StreamSynchronize: then nobody knows.
tf_result tf_submit(tf_device *, tf_lane *, const tf_block *, const tf_launch *, unsigned launches);
tf_result tf_wait(tf_device *, tf_lane *, int event);
tf_result tf_times(tf_device *, tf_lane *, float millis[3]);

tf_result tf_alloc(tf_device *, CUdeviceptr *, size_t bytes);
tf_result tf_free(tf_device *, CUdeviceptr);
tf_result tf_upload(tf_device *, CUdeviceptr, const void *, size_t bytes); // waits
tf_result tf_memory(tf_device *, size_t *left, size_t *total);
tf_result tf_register(tf_device *, void *, size_t bytes);
tf_result tf_unregister(tf_device *, void *);

// tf_map maps memory outside of every heap, NULL when there is none. A child gets none
// of it: a copy of a locked page would take the page away from the device.
void *tf_map(size_t bytes);
int tf_unmap(void *, size_t bytes);

// tf_signals_keep notes the handlers of signals, and tf_signals_restore puts back
// those that a library has replaced by one that does not run on the signal stack,
// where Go needs it. It returns how many.
void tf_signals_keep(void);
int tf_signals_restore(void);

#endif

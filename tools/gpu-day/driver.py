"""What NVIDIA's driver does by itself: driver.py LIBRARY [rehearsal | ORDER] prints "name|value" lines."""

import ctypes as c
import mmap
import subprocess
import sys
import time

driver, option = c.CDLL(sys.argv[1]), "".join(sys.argv[2:])
rehearsal = option == "rehearsal"
ADDRESS, SIZE, POINTER = c.c_uint64, c.c_size_t, c.c_void_p
MIB = 1 << 20
PTX = b"""
.version 6.3
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 ns)
{
	.reg .b64 %rd<5>; .reg .pred %p;
	ld.param.u64 %rd1, [ns]; mov.u64 %rd2, %globaltimer;
L:	mov.u64 %rd3, %globaltimer; sub.u64 %rd4, %rd3, %rd2; setp.lt.u64 %p, %rd4, %rd1; @%p bra L; ret;
}
.visible .entry wild()
{ .reg .b64 %rd<2>; .reg .b32 %r<2>; mov.u64 %rd1, 64; mov.u32 %r1, 1; st.global.u32 [%rd1], %r1; ret; }
.visible .entry none() { ret; }
"""


def call(name, *args):
    return getattr(driver, name)(*args)


def do(name, *args):
    code = call(name, *args)
    if code:
        sys.exit(f"{name} returned {code}")


def make(name, *args, kind=POINTER):
    made = kind()
    do(name, c.byref(made), *args)
    return made


def say(name, value):
    print(f"{name}|{value}", flush=True)


def took(f, n=1):
    begin = time.perf_counter()
    for _ in range(n):
        f()
    return (time.perf_counter() - begin) / n


kept = []


def host(n):
    memory = mmap.mmap(-1, n, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"x" * n)
    kept.append(memory)
    return c.addressof(c.c_char.from_buffer(memory))


def function(module, name):
    return make("cuModuleGetFunction", module, name)


def launch(f, stream, args=None):
    do("cuLaunchKernel", f, 1, 1, 1, 1, 1, 1, 0, stream, args, None)


def start():
    do("cuInit", 0)
    do("cuDevicePrimaryCtxSetFlags_v2", 0, 4)
    do("cuCtxSetCurrent", make("cuDevicePrimaryCtxRetain", 0))


def copies():
    up, down = make("cuStreamCreate", 1), make("cuStreamCreate", 1)
    around = 16 * MIB if rehearsal else 64 * MIB
    total = around if rehearsal else 4096 * MIB
    at = [host(around) for _ in range(4)]
    device = [make("cuMemAlloc_v2", SIZE(around), kind=ADDRESS).value for _ in range(2)]
    for a in at[:2]:
        do("cuMemHostRegister_v2", POINTER(a), SIZE(around), 1)

    def rate(n, h2d, d2h, first=0):
        def go():
            for o in range(0, total, n):
                if h2d:
                    do(
                        "cuMemcpyHtoDAsync_v2",
                        ADDRESS(device[0] + o % around),
                        POINTER(at[first] + o % around),
                        SIZE(n),
                        up,
                    )
                if d2h:
                    do(
                        "cuMemcpyDtoHAsync_v2",
                        POINTER(at[first + 1] + o % around),
                        ADDRESS(device[1] + o % around),
                        SIZE(n),
                        down,
                    )
            do("cuStreamSynchronize", up)
            do("cuStreamSynchronize", down)

        return total / took(go) / 1e9

    for n in (64, 256, 1024, 4096):
        each = [rate(n << 10, *ways) for ways in ((1, 0), (0, 1), (1, 1))]
        say(f"copies of {n} KiB", "h2d {:.1f}, d2h {:.1f}, both at once {:.1f} GB/s each".format(*each))
    say("copies of 1024 KiB, pageable", f"h2d {rate(MIB, 1, 0, 2):.1f}, d2h {rate(MIB, 0, 1, 2):.1f} GB/s")
    for name, flags in (("timed", 1), ("untimed", 3)):
        event = make("cuEventCreate", flags)
        record = took(lambda e=event: do("cuEventRecord", e, up), 2000)
        do("cuEventSynchronize", event)

        def wake(e=event):
            do("cuMemcpyHtoDAsync_v2", ADDRESS(device[0]), POINTER(at[0]), SIZE(65536), up)
            do("cuEventRecord", e, up)
            do("cuEventSynchronize", e)

        waits = sorted(took(wake) for _ in range(200))
        say(
            f"event, {name}, blocking",
            f"{record * 1e6:.2f} us a record; copy of 64 KiB until awake {waits[100] * 1e6:.0f} us",
        )
    for n in (1, 16, 64):
        a = host(n * MIB)
        on = took(lambda a=a, n=n: do("cuMemHostRegister_v2", POINTER(a), SIZE(n * MIB), 1))
        off = took(lambda a=a: do("cuMemHostUnregister", POINTER(a)))
        say(f"register {n} MiB, unregister", f"{on * 1e6:.0f} us, {off * 1e6:.0f} us")


def beside_a_kernel():
    """Times calls while a kernel of 200 ms runs on another stream: which of them wait for it?"""
    module = make("cuModuleLoadDataEx", PTX, 0, None, None)
    spin, none = function(module, b"spin"), function(module, b"none")
    busy, other = make("cuStreamCreate", 1), make("cuStreamCreate", 1)
    ns = c.c_uint64(200_000_000)
    args = (POINTER * 1)(c.addressof(ns))
    locked, locked2, loose, plain = (host(4 * MIB) for _ in range(4))
    for a in locked, locked2:
        do("cuMemHostRegister_v2", POINTER(a), SIZE(4 * MIB), 1)
    on, old = (make("cuMemAlloc_v2", SIZE(4 * MIB), kind=ADDRESS) for _ in range(2))
    waits, goes = [], []
    calls = [
        ("cuMemGetInfo_v2", c.byref(SIZE()), c.byref(SIZE())),
        ("cuMemAlloc_v2", c.byref(ADDRESS()), SIZE(64 * MIB)),
        ("cuMemFree_v2", old),
        ("cuMemHostRegister_v2", POINTER(loose), SIZE(4 * MIB), 1),
        ("cuMemHostUnregister", POINTER(locked2)),
        ("cuMemHostAlloc", c.byref(POINTER()), SIZE(4 * MIB), 1),
        ("cuMemFreeHost", make("cuMemHostAlloc", SIZE(4 * MIB), 1)),
        ("cuEventCreate", c.byref(POINTER()), 1),
        ("cuEventDestroy_v2", make("cuEventCreate", 1)),
        ("cuStreamCreate", c.byref(POINTER()), 1),
        ("cuStreamDestroy_v2", make("cuStreamCreate", 1)),
        ("cuModuleLoadDataEx", c.byref(POINTER()), PTX, 0, None, None),
        ("cuModuleUnload", make("cuModuleLoadDataEx", PTX, 0, None, None)),
        ("cuLaunchKernel", none, 1, 1, 1, 1, 1, 1, 0, other, None, None),
        ("cuMemcpyHtoDAsync_v2", on, POINTER(locked), SIZE(MIB), other),
        ("cuMemcpyDtoHAsync_v2", POINTER(locked), on, SIZE(MIB), other),
        ("cuMemcpyHtoDAsync_v2", on, POINTER(plain), SIZE(MIB), other),
        ("cuMemcpyDtoHAsync_v2", POINTER(plain), on, SIZE(MIB), other),
    ]
    for name, *given in calls:
        do("cuCtxSynchronize")
        launch(spin, busy, args)
        time.sleep(0.02)
        t = took(lambda name=name, given=given: do(name, *given))
        (waits if call("cuStreamQuery", busy) == 0 else goes).append(f"{name[2:].removesuffix('_v2')} {t * 1e3:.2f}")
    say("beside a kernel of 200 ms, these wait (ms)", ", ".join(waits))
    say("beside a kernel of 200 ms, these do not (ms)", ", ".join(goes))
    do("cuCtxSynchronize")
    say("launch of an empty kernel", f"{took(lambda: launch(none, other), 2000) * 1e6:.2f} us")


def after_a_wild_store(order):
    """Kills a context, does what order says, and makes another one: its code is the answer."""
    start()
    launch(function(make("cuModuleLoadDataEx", PTX, 0, None, None), b"wild"), make("cuStreamCreate", 1))
    died = call("cuCtxSynchronize")
    for step in order.split("+"):
        if step == "reset":
            call("cuDevicePrimaryCtxReset_v2", 0)
        elif step == "release":
            call("cuDevicePrimaryCtxRelease_v2", 0)
        elif step == "unset":
            call("cuCtxSetCurrent", None)
        elif step == "sleep":
            time.sleep(1)
    say(order, f"{died}, then {call('cuDevicePrimaryCtxRetain', c.byref(POINTER()), 0)}")


if option and not rehearsal:
    after_a_wild_store(option)
    sys.exit()
start()
copies()
if not rehearsal:
    beside_a_kernel()
    for way in ("reset+release", "unset+reset+release", "release+reset", "unset+reset+sleep+release+sleep"):
        p = subprocess.run(
            [sys.executable, *sys.argv[:2], way], capture_output=True, text=True, timeout=60, check=False
        )
        say(f"a new context after a wild store, {way}", (p.stdout or p.stderr).strip().rpartition("|")[2])

// Activations of float32 without a mathematical library. They consist of +, -, *, /,
// fused multiply-add, comparisons and integers, each rounded as IEEE 754 says, in a
// fixed order: so a GPU and a host compute the same bits, a NaN's payload excepted.
//
// The polynomials are minimax fits of the relative error (Remez' algorithm at 120
// bits), rounded to float32. The bounds are in units in the last place, against the same
// expression in float64, which all floats of 2^-31 to 2^8 were once compared with; a
// test samples. Results below 2^-126 are within 2 units, of 2^-149.
#pragma once

typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __INT32_TYPE__ int32_t;

namespace floats {

// power is m·2^n.
struct power {
	float m;
	int32_t n;
};

// two_to returns 2^n, for -126 <= n <= 127.
static __device__ inline float two_to(int32_t n) {
	uint32_t bits = (uint32_t)(n + 127) << 23;
	float f;
	__builtin_memcpy(&f, &bits, sizeof f);
	return f;
}

// scaled returns x·e, for -252 <= e.n <= 0. It takes two steps, because 2^n alone may
// underflow; the first is exact where x·m is not tiny, which it is for n near 0 only.
static __device__ inline float scaled(float x, power e) {
	return x * two_to(e.n / 2) * two_to(e.n - e.n / 2);
}

// exp returns e^(hi+lo), for -145 <= hi <= 0 and a lo below hi's last place. Its m is
// within 1.2 units: 1 + r + r²·q(r), with r within ln(2)/2 of 0 and q of degree 4, which
// alone is within 2^-28.
static __device__ inline power exp(float hi, float lo) {
	const float shift = 0x1.8p23f; // a sum with it has no fraction
	float n = __builtin_fmaf(hi, 0x1.715476p0f, shift) - shift;
	// The logarithm of 2 in two parts; the first difference is exact.
	float r = __builtin_fmaf(n, -0x1.62e43p-1f, hi);
	r = __builtin_fmaf(n, 0x1.05c61p-29f, r) + lo;
	float q = 0x1.6a2368p-10f;
	q = __builtin_fmaf(q, r, 0x1.123a6ap-7f);
	q = __builtin_fmaf(q, r, 0x1.5558f4p-5f);
	q = __builtin_fmaf(q, r, 0x1.55549p-3f);
	q = __builtin_fmaf(q, r, 0x1.fffffcp-2f);
	return {1 + __builtin_fmaf(r * r, q, r), (int32_t)n};
}

// at_most returns |x|, or most where that is less or x is NaN.
static __device__ inline float at_most(float x, float most) {
	float a = x < 0 ? -x : x;
	return a < most ? a : most;
}

// gated returns x/(1 + e^-t), for e = e^-|t| and a t of x's sign. It multiplies by e
// last, so that small results keep their precision.
static __device__ inline float gated(float x, power e) {
	float below = 1 + scaled(e.m, e);
	return x < 0 ? scaled(x * e.m / below, e) : x / below;
}

// silu returns x/(1 + e^-x), within 4 units.
static __device__ inline float silu(float x) {
	if (x < -120) {
		return x * 0; // rounds to -0; NaN for an infinite x, as everywhere below
	}
	return gated(x, exp(-at_most(x, 120), 0));
}

// gelu_tanh returns x/(1 + e^-t) for t = 2·√(2/π)·(x + 0.044715·x³), within 4 units.
// An error in t counts up to 100 times, so t is a sum of two floats.
static __device__ inline float gelu_tanh(float x) {
	if (x < -12) {
		return x * 0;
	}
	const float one = 0x1.988454p0f, one_lo = -0x1.857936p-25f;     // factor of x
	const float three = 0x1.2444f2p-4f, three_lo = 0x1.49b16ap-29f; // factor of x³
	float a = at_most(x, 12);
	float square = a * a, square_lo = __builtin_fmaf(a, a, -square);
	float cube = three * square; // over a
	float cube_lo = __builtin_fmaf(three, square, -cube);
	cube_lo += __builtin_fmaf(three, square_lo, three_lo * square);
	float sum = one + cube, part = sum - one;
	float sum_lo = (one - (sum - part)) + (cube - part) + (cube_lo + one_lo);
	float t = sum * a;
	float t_lo = __builtin_fmaf(sum, a, -t) + sum_lo * a;
	return gated(x, exp(-t, -t_lo));
}

// gelu returns x·Φ(x), within 6 units. For a = |x| it has Φ(-a) = e^(-a²/2)·p(s)/(1+a):
// the quotient is erfcx(a/√2)/2 and p, of degree 10 in s = (a-4)/(a+4), is within 2^-29.
static __device__ inline float gelu(float x) {
	if (x < -15) {
		return x * 0;
	}
	float a = at_most(x, 15);
	float square = a * a, square_lo = __builtin_fmaf(a, a, -square);
	power e = exp(-0.5f * square, -0.5f * square_lo);
	float s = (a - 4) / (a + 4);
	float p = -0x1.2de874p-14f;
	p = __builtin_fmaf(p, s, -0x1.021e76p-14f);
	p = __builtin_fmaf(p, s, 0x1.6aeb56p-11f);
	p = __builtin_fmaf(p, s, -0x1.3e2edp-12f);
	p = __builtin_fmaf(p, s, -0x1.47f04ap-8f);
	p = __builtin_fmaf(p, s, 0x1.25eec6p-6f);
	p = __builtin_fmaf(p, s, -0x1.07c2bcp-5f);
	p = __builtin_fmaf(p, s, 0x1.d494f6p-6f);
	p = __builtin_fmaf(p, s, 0x1.cabd28p-7f);
	p = __builtin_fmaf(p, s, -0x1.8c18fp-4f);
	p = __builtin_fmaf(p, s, 0x1.e361eap-2f);
	float tail = p * e.m / (1 + a);
	return x < 0 ? scaled(x * tail, e) : x * (1 - scaled(tail, e));
}

// relu returns max(x, 0): 0 for -0, and NaN for NaN.
static __device__ inline float relu(float x) {
	return x > 0 || x != x ? x : 0;
}

// activate returns what the package's Activation of this code makes of x. It is a
// function of its own because linear_f32 calls it from 16 places.
static __device__ __attribute__((noinline)) float activate(float x, uint32_t activation) {
	switch (activation) {
	case 1: return relu(x);
	case 2: return gelu(x);
	case 3: return gelu_tanh(x);
	case 4: return silu(x);
	}
	return x;
}

} // namespace floats

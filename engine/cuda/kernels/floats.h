// Conversions of elements, and activations of float32 without a mathematical library. They consist of +, -, *, /,
// fused multiply-add, comparisons and integers, each rounded as IEEE 754 says, in a
// fixed order: so a GPU and a host compute the same bits, a NaN's payload excepted.
//
// The polynomials are minimax fits of the relative error (Remez' algorithm at 120
// bits), rounded to float32. The bounds are in units in the last place, against the same
// expression in float64, which all floats of 2^-31 to 2^8 were once compared with; a
// test samples. Results below 2^-126 are within 2 units, of 2^-149.
#pragma once

typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __INT32_TYPE__ int32_t;

namespace floats {

// power is m·2^n.
struct power {
	float m;
	int32_t n;
};

// bits_of and of_bits are a float's bits, and the float of bits.
static __device__ inline uint32_t bits_of(float f) {
	uint32_t bits;
	__builtin_memcpy(&bits, &f, sizeof f);
	return bits;
}

static __device__ inline float of_bits(uint32_t bits) {
	float f;
	__builtin_memcpy(&f, &bits, sizeof f);
	return f;
}

// f16 and bf16 are elements of float16 and bfloat16.
struct f16 {
	uint16_t bits;
};
struct bf16 {
	uint16_t bits;
};

// widen returns the float that an element is, exactly; a float64 is rounded.
static __device__ inline float widen(float v) { return v; }
static __device__ inline float widen(double v) { return (float)v; }
static __device__ inline float widen(bf16 v) { return of_bits((uint32_t)v.bits << 16); }
static __device__ inline float widen(f16 v) {
	uint32_t sign = (uint32_t)(v.bits & 0x8000) << 16, magnitude = (uint32_t)(v.bits & 0x7fff) << 13;
	if (magnitude >= 0x1fu << 23) { // infinite or NaN
		return of_bits(sign | 0x7f800000 | magnitude);
	}
	return of_bits(sign | bits_of(of_bits(magnitude) * 0x1p112f)); // from the one bias to the other; subnormals, too
}

// narrow stores v, rounded to nearest even. What is too large becomes infinite, a NaN stays one.
static __device__ inline void narrow(float v, float *to) { *to = v; }
static __device__ inline void narrow(float v, double *to) { *to = v; }
static __device__ inline void narrow(float v, bf16 *to) {
	uint32_t u = bits_of(v);
	to->bits = v != v ? u >> 16 | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
static __device__ inline void narrow(float v, f16 *to) {
	uint32_t sign = bits_of(v) >> 16 & 0x8000, u = bits_of(v) & 0x7fffffff;
	if (u > 0x7f800000) {
		u = 0x7e00;
	} else if (u >= 0x47800000) { // 2^16
		u = 0x7c00;
	} else if (u < 0x38800000) { // 2^-14: a sum with 1/2 has the steps of subnormals
		u = bits_of(of_bits(u) + 0.5f) - 0x3f000000;
	} else { // a carry may go into the exponent, and make it infinite
		u = (u + 0xfff + (u >> 13 & 1) - (112u << 23)) >> 13;
	}
	to->bits = sign | u;
}

// element is what the package's Float of this code is: get and put have one at i.
enum element { F32, F16, BF16, F64 };

static __device__ inline float get(const uint8_t *x, uint64_t i, uint32_t type) {
	switch (type) {
	case F16: return widen(((const f16 *)x)[i]);
	case BF16: return widen(((const bf16 *)x)[i]);
	case F64: return widen(((const double *)x)[i]);
	}
	return ((const float *)x)[i];
}

static __device__ inline void put(uint8_t *x, uint64_t i, uint32_t type, float v) {
	switch (type) {
	case F16: return narrow(v, (f16 *)x + i);
	case BF16: return narrow(v, (bf16 *)x + i);
	case F64: return narrow(v, (double *)x + i);
	}
	((float *)x)[i] = v;
}

// two_to returns 2^n, for -126 <= n <= 127.
static __device__ inline float two_to(int32_t n) {
	return of_bits((uint32_t)(n + 127) << 23);
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

// exponential returns e^(x-top) for x <= top, within 2 units. NaN and an infinite top make NaN.
static __device__ inline float exponential(float x, float top) {
	float hi = x - top;
	if (hi < -104) {
		return 0; // below 2^-150
	}
	if (hi != hi) {
		return hi;
	}
	float part = x - hi; // what the difference leaves of either is exact, and so is their sum
	power e = exp(hi, (x - (hi + part)) + (part - top));
	return scaled(e.m, e);
}

// larger returns the larger, or NaN if one is.
static __device__ inline float larger(float a, float b) { return b > a || b != b ? b : a; }

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

// sigmoid returns 1/(1 + e^-x), within 4 units.
static __device__ inline float sigmoid(float x) {
	power e = exp(-at_most(x, 120), 0);
	float below = 1 + scaled(e.m, e);
	if (x < 0) {
		return scaled(e.m / below, e);
	}
	return x != x ? x : 1 / below;
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
	case 5: return sigmoid(x);
	}
	return x;
}

} // namespace floats

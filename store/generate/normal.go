package generate

import "math"

// What follows uses only operations that IEEE 754 rounds correctly, and converts
// each product, which keeps a compiler from fusing it with the sum: so a value has
// the same bits on every machine. The functions of package math do not promise that.

// normal turns 64 random bits into a value of N(0, 1): the point that a share u of
// the distribution lies below, where u is the middle of one of 2^53 equal parts of
// [0, 1]. No value is further out than 8.3. The approximation is PPND16 of
// M. J. Wichura, "Algorithm AS 241: The Percentage Points of the Normal
// Distribution", Applied Statistics 37 (1988), 477-484: about 1 part in 10^16.
func normal(bits uint64) float64 {
	q := (float64(int64(bits>>11)-1<<52) + 0.5) * 0x1p-53 // u - 1/2, exactly
	if math.Abs(q) <= 0.425 {
		r := 0.180625 - float64(q*q)
		return q * polynomial(r, &centralOver) / polynomial(r, &centralUnder)
	}
	r := math.Sqrt(-ln(0.5 - math.Abs(q)))
	over, under := &tailOver, &tailUnder
	from := 1.6
	if r > 5 {
		over, under, from = &farOver, &farUnder, 5
	}
	return math.Copysign(polynomial(r-from, over)/polynomial(r-from, under), q)
}

// ln is the natural logarithm of a positive, normal x: that of its power of two,
// and for the rest f, within a factor of √2 of 1, the series of
// ln f = 2 artanh((f-1)/(f+1)).
func ln(x float64) float64 {
	f, e := math.Frexp(x)
	if f < math.Sqrt2/2 {
		f, e = 2*f, e-1
	}
	s := (f - 1) / (f + 1)
	square := float64(s * s) // at most 0.03: ten more terms are below 2^-53
	sum := 1.0 / 21
	for n := 19.0; n >= 1; n -= 2 {
		sum = float64(sum*square) + 1/n
	}
	return float64(2*s*sum) + float64(float64(e)*math.Ln2)
}

// polynomial has its constant first.
func polynomial(x float64, c *[8]float64) float64 {
	y := float64(c[7]*x) + c[6]
	y = float64(y*x) + c[5]
	y = float64(y*x) + c[4]
	y = float64(y*x) + c[3]
	y = float64(y*x) + c[2]
	y = float64(y*x) + c[1]
	return float64(y*x) + c[0]
}

// The coefficients of AS 241, for |q| up to 0.425, r up to 5, and beyond.
var (
	centralOver = [8]float64{
		3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
		4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3,
	}
	centralUnder = [8]float64{
		1, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
		2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3,
	}
	tailOver = [8]float64{
		1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
		1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4,
	}
	tailUnder = [8]float64{
		1, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
		1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9,
	}
	farOver = [8]float64{
		6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
		2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7,
	}
	farUnder = [8]float64{
		1, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
		7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15,
	}
)

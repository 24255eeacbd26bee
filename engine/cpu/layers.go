package cpu

import (
	"math"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/gonum"

	"github.com/tensorferry/tensorferry/engine/stack"
)

// kernels make what computes a step of each kind.
var kernels = map[string]func(*stack.Step) kernel{
	"linear":    linear,
	"relu":      elementwise(func(x float32) float32 { return max(x, 0) }),
	"gelu":      gelu,
	"silu":      elementwise(func(x float32) float32 { return float32(float64(x) / (1 + math.Exp(-float64(x)))) }),
	"layernorm": norm,
	"rmsnorm":   norm,
	"residual":  residual,
	"scale":     scale,
	"softmax":   func(*stack.Step) kernel { return perRow(softmax) },
}

// linear is x·Wᵀ + bias. gonum takes different paths through x·Wᵀ for small and
// large problems, which round differently; so W is transposed here, once, and
// cut into panels that gonum multiplies serially, whatever the number of rows:
// an output is always bias + x₀w₀ + x₁w₁ + … in this order.
func linear(s *stack.Step) kernel {
	w, bias, in, out := s.Weight, s.Bias, s.In, s.Out
	// A panel holds the weights of panelWidth outputs: in rows, one output a column.
	panels := make([]float32, in*out)
	for left := 0; left < out; left += panelWidth {
		n := min(panelWidth, out-left)
		panel := panels[left*in:][:n*in]
		for j := range n {
			for i, v := range w[(left+j)*in:][:in] {
				panel[i*n+j] = v
			}
		}
	}
	return func(t *tile) {
		for r := range t.rows {
			copy(t.y[r*out:], bias)
		}
		for left := 0; left < out; left += panelWidth {
			n := min(panelWidth, out-left)
			panel := panels[left*in:][:n*in]
			for top := 0; top < in; top += panelDepth {
				k := min(panelDepth, in-top)
				gonum.Implementation{}.Sgemm(blas.NoTrans, blas.NoTrans, t.rows, n, k,
					1, t.x[top:], in, panel[top*n:], n, 1, t.y[left:], out)
			}
		}
		t.x, t.y, t.width = t.y, t.x, out
	}
}

func elementwise(f func(float32) float32) func(*stack.Step) kernel {
	each := perRow(func(x []float32) {
		for i, v := range x {
			x[i] = f(v)
		}
	})
	return func(*stack.Step) kernel { return each }
}

func perRow(f func(x []float32)) kernel {
	return func(t *tile) {
		for r := range t.rows {
			f(t.x[r*t.width:][:t.width])
		}
	}
}

// gelu is x·Φ(x), or its approximation.
func gelu(s *stack.Step) kernel {
	f := func(x float64) float64 { return x * math.Erfc(-x/math.Sqrt2) / 2 }
	if s.Tanh {
		f = func(x float64) float64 { return x / (1 + math.Exp(-2*math.Sqrt(2/math.Pi)*(x+0.044715*x*x*x))) }
	}
	return elementwise(func(x float32) float32 { return float32(f(float64(x))) })(s)
}

// norm is layernorm, or rmsnorm, whose mean counts as 0 and which has no bias.
func norm(s *stack.Step) kernel {
	weight, bias, eps, centered := s.Weight, s.Bias, s.Eps, s.Kind == "layernorm"
	return perRow(func(x []float32) {
		var mean, squares float64
		if centered {
			for _, v := range x {
				mean += float64(v)
			}
			mean /= float64(len(x))
		}
		for _, v := range x {
			d := float64(v) - mean
			squares += d * d
		}
		scale := 1 / math.Sqrt(squares/float64(len(x))+eps)
		for i, v := range x {
			x[i] = float32((float64(v)-mean)*scale*float64(weight[i]) + float64(bias[i]))
		}
	})
}

// residual remembers x, or adds what was remembered last.
func residual(s *stack.Step) kernel {
	if !s.Add {
		return func(t *tile) {
			copy(t.kept[t.depth], t.x[:t.rows*t.width])
			t.depth++
		}
	}
	return func(t *tile) {
		t.depth--
		for i, v := range t.kept[t.depth][:t.rows*t.width] {
			t.x[i] += v
		}
	}
}

func scale(s *stack.Step) kernel {
	factor := s.Factor
	return elementwise(func(x float32) float32 { return factor * x })(s)
}

// softmax subtracts the largest element, so that no exponential overflows.
func softmax(x []float32) {
	top := float32(math.Inf(-1))
	for _, v := range x {
		top = max(top, v)
	}
	var sum float64
	for i, v := range x {
		e := math.Exp(float64(v) - float64(top))
		sum += e
		x[i] = float32(e)
	}
	for i, v := range x {
		x[i] = float32(float64(v) / sum)
	}
}

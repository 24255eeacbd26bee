package cpu

import (
	"context"
	"math"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/gonum"

	"github.com/tensorferry/tensorferry/engine/stack"
)

// kernels make what computes a step of each kind.
var kernels = map[string]func(*stack.Step) kernel{
	"linear":     linear,
	"activation": func(s *stack.Step) kernel { return elementwise(activations[s.Activation]) },
	"layernorm":  norm,
	"rmsnorm":    norm,
	"residual":   residual,
	"scale":      scale,
	"softmax":    func(*stack.Step) kernel { return perRow(softmax) },
	"positions":  positions,
	"attention":  attention,
	"gated":      gated,
}

// activations are computed in float64 and rounded once.
var activations = map[string]func(float32) float32{
	"relu": func(x float32) float32 { return max(x, 0) },
	"gelu": func(x float32) float32 { return float32(float64(x) * math.Erfc(-float64(x)/math.Sqrt2) / 2) },
	"gelu_tanh": func(v float32) float32 {
		x := float64(v)
		return float32(x / (1 + math.Exp(-2*math.Sqrt(2/math.Pi)*(x+0.044715*x*x*x))))
	},
	"silu":    func(x float32) float32 { return float32(float64(x) / (1 + math.Exp(-float64(x)))) },
	"sigmoid": func(x float32) float32 { return float32(1 / (1 + math.Exp(-float64(x)))) },
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
	return func(ctx context.Context, t *tile) {
		for r := range t.rows {
			copy(t.y[r*out:], bias)
		}
		for first := 0; first < t.rows; first += tileRows {
			rows, x, y := min(tileRows, t.rows-first), t.x[first*in:], t.y[first*out:]
			for left := 0; left < out; left += panelWidth {
				n := min(panelWidth, out-left)
				panel := panels[left*in:][:n*in]
				for top := 0; top < in && !t.rest(ctx); top += tileRows {
					k := min(tileRows, in-top)
					gonum.Implementation{}.Sgemm(blas.NoTrans, blas.NoTrans, rows, n, k,
						1, x[top:], in, panel[top*n:], n, 1, y[left:], out)
				}
			}
		}
		t.x, t.y, t.width = t.y, t.x, out
	}
}

func elementwise(f func(float32) float32) kernel {
	return perRow(func(x []float32) {
		for i, v := range x {
			x[i] = f(v)
		}
	})
}

func perRow(f func(x []float32)) kernel {
	return func(ctx context.Context, t *tile) {
		t.each(ctx, func(r int) { f(t.x[r*t.width:][:t.width]) })
	}
}

// each calls f for every row. An item may have thousands, and the exponentials of
// tileRows take up to half a second.
func (t *tile) each(ctx context.Context, f func(r int)) {
	for r := range t.rows {
		if r%tileRows == 0 && t.rest(ctx) {
			return
		}
		f(r)
	}
}

// gated is one half of x, activated, times the other.
func gated(s *stack.Step) kernel {
	f, out := activations[s.Activation], s.Out
	return func(ctx context.Context, t *tile) {
		t.each(ctx, func(r int) {
			x := t.x[r*2*out:][:2*out]
			for i, v := range x[:out] {
				t.y[r*out+i] = f(v) * x[out+i]
			}
		})
		t.x, t.y, t.width = t.y, t.x, out
	}
}

// positions adds the row of a table to each position of an item, which is a tile.
func positions(s *stack.Step) kernel {
	table := s.Weight
	return func(_ context.Context, t *tile) {
		for i, v := range table[t.past*t.width:][:t.rows*t.width] {
			t.x[i] += v
		}
	}
}

// attention weighs the values of an item, which is a tile, for each of its positions: with the
// softmax of query·key/√width of a head, over the keys that the mask and, in causal attention, its own place
// leave it. It has the scores of tileRows queries of one head at a time, in rows of one key, so that only
// these queries are transposed; as in linear, gonum multiplies serially, and sums over a head's width and
// over keys are in float32 and ascend. What is hidden has the weight 0, which gonum leaves out: not even
// a NaN comes through.
//
// In a sequence, the keys and values are those of all its positions: the sums are the same ones, however
// the positions came.
func attention(s *stack.Step) kernel {
	all, out, causal := s.In, s.Out, s.Causal
	width := out / s.Heads
	scale := 1 / math.Sqrt(float64(width))
	return func(ctx context.Context, t *tile) {
		var columns []float32 // of keys, in a sequence
		values, stride := t.x[2*out:], all
		if t.cache != nil {
			columns, values = t.keep(out)
			stride = out
		}
		for first := 0; first < t.rows; first += tileRows {
			n, keys := min(tileRows, t.rows-first), t.rows
			if causal {
				keys = t.past + first + n
			}
			scores := t.scores[:keys*n]
			for left := 0; left < out && !t.rest(ctx); left += width {
				for i := range n {
					for j, v := range t.x[(first+i)*all+left:][:width] {
						t.queries[j*n+i] = v
					}
				}
				for top := 0; top < keys; top += panelWidth {
					k := min(panelWidth, keys-top)
					switch {
					case columns == nil:
						gonum.Implementation{}.Sgemm(blas.NoTrans, blas.NoTrans, k, n, width,
							1, t.x[top*all+out+left:], all, t.queries, n, 0, scores[top*n:], n)
					case n > 1:
						gonum.Implementation{}.Sgemm(blas.Trans, blas.NoTrans, k, n, width,
							1, columns[left*t.most+top:], t.most, t.queries, n, 0, scores[top*n:], n)
					default: // the same, but one row instead of k rows of one number: four times as fast, November 2026
						gonum.Implementation{}.Sgemm(blas.NoTrans, blas.NoTrans, 1, k, width,
							1, t.queries, width, columns[left*t.most+top:], t.most, 0, scores[top:], k)
					}
				}
				sums := weigh(scores, n, scale, func(key int) int {
					switch {
					case t.mask != nil && t.mask[key] == 0:
						return n
					case causal:
						return max(0, key-t.past-first)
					}
					return 0
				})
				for at := 0; at < width; at += panelWidth {
					gonum.Implementation{}.Sgemm(blas.Trans, blas.NoTrans, n, min(panelWidth, width-at), keys,
						1, scores, n, values[left+at:], stride, 0, t.y[first*out+left+at:], out)
				}
				for i := range n {
					y := t.y[(first+i)*out+left:][:width]
					for j, v := range y {
						y[j] = float32(float64(v) / sums[i])
					}
				}
			}
		}
		t.x, t.y, t.width = t.y, t.x, out
	}
}

// weigh makes weights of the scores of n queries, in rows of one key, and returns what to divide
// by. The first hidden queries do not see a key; one that sees none has weights of 0.
func weigh(scores []float32, n int, scale float64, hidden func(key int) int) (sums [tileRows]float64) {
	var most [tileRows]float32
	for i := range most {
		most[i] = float32(math.Inf(-1))
	}
	for key := range len(scores) / n {
		for i := hidden(key); i < n; i++ {
			most[i] = max(most[i], scores[key*n+i])
		}
	}
	for key := range len(scores) / n {
		row, first := scores[key*n:][:n], hidden(key)
		clear(row[:first])
		for i := first; i < n; i++ {
			e := math.Exp(scale * (float64(row[i]) - float64(most[i])))
			sums[i] += e
			row[i] = float32(e)
		}
	}
	for i, sum := range sums {
		if sum == 0 { // no key was seen: the largest has the weight 1
			sums[i] = 1
		}
	}
	return sums
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
		return func(_ context.Context, t *tile) {
			copy(t.kept[t.depth], t.x[:t.rows*t.width])
			t.depth++
		}
	}
	return func(_ context.Context, t *tile) {
		t.depth--
		for i, v := range t.kept[t.depth][:t.rows*t.width] {
			t.x[i] += v
		}
	}
}

func scale(s *stack.Step) kernel {
	factor := s.Factor
	return elementwise(func(x float32) float32 { return factor * x })
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

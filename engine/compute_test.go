package engine_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// scaled multiplies the bytes of rows of "x" by the scalar byte "by", which it
// needs whole; its second output are the first bytes of the rows.
func scaled(t *testing.T, h *cpu.Host, fail error) engine.Model {
	t.Helper()
	m, err := cpu.RowFunc{
		Info: engine.Info{
			Name: "scaled", Rows: 1, BlockRows: 3,
			Inputs: []engine.Port{
				{Name: "x", DTypes: []tensor.DataType{tensor.Uint8}, Shape: []int64{engine.Free, engine.Free}},
				{Name: "by", DTypes: []tensor.DataType{tensor.Uint8}, Whole: true},
			},
			Outputs: []engine.Port{{Name: "y", Shape: []int64{engine.Free, engine.Free}}, {Name: "head", Shape: []int64{engine.Free, 1}}},
		},
		Outs: func(in []tensor.Desc, _ map[string]string) ([]tensor.Desc, error) {
			return []tensor.Desc{in[0].Clone(), {DType: tensor.Uint8, Shape: tensor.Shape{in[0].Shape[0], 1}}}, nil
		},
		Rows: func(_ context.Context, b cpu.RowBlock) error {
			if fail != nil && b.Row > 0 {
				return fail
			}
			width := int64(len(b.In[0])) / b.Rows
			for i, x := range b.In[0] {
				b.Out[0][i] = x * b.Whole[1][0]
			}
			for row := range b.Rows {
				b.Out[1][row] = b.Out[0][row*width]
			}
			return nil
		},
	}.Model(h)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func newHost(t *testing.T) *cpu.Host {
	t.Helper()
	h := cpu.NewHost(cpu.HostConfig{MemoryBytes: 8 << 20, Workers: 2})
	t.Cleanup(func() {
		used, _, _ := h.Budget().Used()
		if slabs, _ := h.Pool().Live(); used != 0 || slabs != 0 {
			t.Errorf("%d bytes of the budget and %d slabs are still held", used, slabs)
		}
		h.Close()
	})
	return h
}

func TestComputeReturnsWhatTheRowsMake(t *testing.T) {
	testkit.Start(t)
	m := scaled(t, newHost(t), nil)
	by, err := tensor.New(tensor.Desc{DType: tensor.Uint8}, []byte{3})
	if err != nil {
		t.Fatal(err)
	}
	// Blocks have 3 rows; one row more or less, none, and more than there are slots.
	for _, rows := range []int64{0, 1, 2, 3, 4, 6, 7, 1000} {
		for _, width := range []int64{1, 5} {
			t.Run(fmt.Sprintf("%dx%d", rows, width), func(t *testing.T) {
				x, err := tensor.Of(testkit.Bytes(int(rows*width), 1), rows, width)
				if err != nil {
					t.Fatal(err)
				}
				want := bytes.Clone(x.Data)
				var head []byte
				for i := range want {
					if want[i] *= 3; int64(i)%width == 0 {
						head = append(head, want[i])
					}
				}
				out, err := engine.Compute(t.Context(), m, nil, x, by)
				if err != nil {
					t.Fatal(err)
				}
				if !out[0].Equal(x.Desc) || !bytes.Equal(out[0].Data, want) || !bytes.Equal(out[1].Data, head) {
					t.Errorf("got %v and %v", out[0].Desc, out[1].Desc)
				}
			})
		}
	}
}

func TestComputeFailsAsOpenAndTheRunDo(t *testing.T) {
	testkit.Start(t)
	h := newHost(t)
	broken := errors.New("row out of order")
	ended, end := context.WithCancel(t.Context())
	end()
	x, err := tensor.Of(make([]byte, 4000), 1000, 4)
	if err != nil {
		t.Fatal(err)
	}
	by := tensor.Tensor{Desc: tensor.Desc{DType: tensor.Uint8}, Data: []byte{3}}
	for name, tc := range map[string]struct {
		ctx  context.Context
		fail error
		in   []tensor.Tensor
		want error
	}{
		"an input is missing":     {t.Context(), nil, []tensor.Tensor{x}, engine.ErrInput},
		"an input too many":       {t.Context(), nil, []tensor.Tensor{x, by, by}, engine.ErrInput},
		"bytes that do not fit":   {t.Context(), nil, []tensor.Tensor{{Desc: x.Desc, Data: x.Data[1:]}, by}, engine.ErrInput},
		"the model's own failure": {t.Context(), broken, []tensor.Tensor{x, by}, broken},
		"a context that has gone": {ended, nil, []tensor.Tensor{x, by}, context.Canceled},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := engine.Compute(tc.ctx, scaled(t, h, tc.fail), nil, tc.in...)
			if out != nil || !errors.Is(err, tc.want) {
				t.Errorf("got %v, %v; want %v", out, err, tc.want)
			}
		})
	}
}

func TestComputeFillsAllBlocksBesideAnInputWithoutBytes(t *testing.T) {
	testkit.Start(t)
	free := []int64{engine.Free, engine.Free}
	m, err := cpu.RowFunc{
		Info: engine.Info{
			Name: "first", Rows: 1, BlockRows: 3, Inputs: []engine.Port{{Name: "x", Shape: free}, {Name: "none", Shape: free}},
			Outputs: []engine.Port{{Name: "y", Shape: free}},
		},
		Outs: func(in []tensor.Desc, _ map[string]string) ([]tensor.Desc, error) {
			return []tensor.Desc{in[0].Clone()}, nil
		},
		Rows: func(_ context.Context, b cpu.RowBlock) error {
			copy(b.Out[0], b.In[0])
			return nil
		},
	}.Model(newHost(t))
	if err != nil {
		t.Fatal(err)
	}
	x, err := tensor.Of(testkit.Bytes(7*5, 1), 7, 5)
	if err != nil {
		t.Fatal(err)
	}
	none, err := tensor.New(tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{7, 0}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	y, err := engine.Compute(t.Context(), m, nil, x, none)
	if err != nil || !bytes.Equal(y[0].Data, x.Data) {
		t.Errorf("got %v, %v", y, err)
	}
}

// keeper is a model that has seen the state of its last call.
type keeper struct {
	engine.Model
	state engine.State
}

func (k *keeper) Open(ctx context.Context, c engine.Call) (engine.Run, error) {
	k.state = c.State
	return k.Model.Open(ctx, c)
}

type kept struct{ engine.State }

func TestAStepIsACallWithAState(t *testing.T) {
	testkit.Start(t)
	m := &keeper{Model: scaled(t, newHost(t), nil)}
	x := tensor.Tensor{Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{1, 1}}, Data: []byte{2}}
	by := tensor.Tensor{Desc: tensor.Desc{DType: tensor.Uint8}, Data: []byte{3}}
	for _, s := range []engine.State{&kept{}, nil} {
		out, err := engine.Step(t.Context(), m, s, x, by)
		if err != nil || out[0].Data[0] != 6 || m.state != s {
			t.Errorf("got %v, %v, with the state %v", out, err, m.state)
		}
	}
}

func TestACallMayLeaveOutWhatIsOptional(t *testing.T) {
	shape := []int64{engine.AnyAxes}
	info := engine.Info{
		Name: "m", Rows: 1, Outputs: []engine.Port{{Name: "y", Shape: shape}},
		Inputs: []engine.Port{{Name: "table", Shape: shape, Whole: true, Optional: true}, {Name: "x", Shape: shape}, {Name: "bias", Shape: shape, Optional: true}},
	}
	require.NoError(t, info.Validate())
	for call, wrong := range map[string]string{
		"x": "", "table x": "", "x bias": "", "table x bias": "",
		"": `input "x"`, "table": `input "x"`, "table bias": `input "bias"`, "bias x": `input "x"`, "x other": `input "*"`, "x x": `input "*"`,
	} {
		var c engine.Call
		for port := range strings.FieldsSeq(call) {
			c.Inputs = append(c.Inputs, engine.Input{Port: port, Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{3, 2}}, ChunkBytes: 1})
		}
		rows, err := info.Check(c)
		if wrong != "" {
			require.ErrorContains(t, err, wrong, call)
			continue
		}
		require.NoError(t, err, call)
		require.EqualValues(t, 3, rows)
		require.Len(t, info.Of(c.Inputs).Inputs, len(c.Inputs))
	}
	info.Inputs = info.Inputs[2:]
	require.ErrorIs(t, info.Validate(), engine.ErrInfo) // a call without inputs would have no rows
}

// Package engine holds the interfaces that every engine, a place where models run, implements.
//
// It refuses to know how a model computes, and about sockets, sessions and credits: whoever
// serves a model fills its input and takes its results. Engines live below it (engine/cpu on
// engine/blocks, …) and pass engine/enginetest. Input memory is the engine's, borrowed block
// by block; result memory is the engine's too, shared until released.
package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// Errors that a server decides on.
var (
	// ErrNotFound is wrapped when no model has the name asked for.
	ErrNotFound = errors.New("engine: no such model")
	// ErrUnavailable is wrapped when an engine cannot run here or now.
	ErrUnavailable = errors.New("engine: unavailable")
	// ErrClosed is returned by a run or model that has been closed.
	ErrClosed = errors.New("engine: the model is closed")
	// ErrInput is wrapped when a model does not take what a call offers; the
	// text names the port, what is wanted and what was got.
	ErrInput = errors.New("engine: input not accepted")
	// ErrParam is wrapped when a call has a param that the model does not declare, or
	// whose text is not what it should be.
	ErrParam = errors.New("engine: param not accepted")
	// ErrPrecondition is wrapped when a model's state does not allow what a call asks for, or
	// the elements of its input do not; the text says what to do first, or which elements.
	ErrPrecondition = errors.New("engine: refused")
	// ErrStateLost is wrapped when the State of a call is gone, for example with its process.
	ErrStateLost = errors.New("engine: the state is lost")
	// ErrModel is wrapped around the failure of a model's own code.
	ErrModel = errors.New("engine: model failed")
	// ErrLost is wrapped when Close gave up waiting for a model's own code to stop, as
	// a *LostError. The memory of such a run is not used again before it has stopped.
	ErrLost = errors.New("engine: model does not stop")
)

// LostError says that a model's own code goes on after Close. It wraps ErrLost.
type LostError struct {
	Text  string
	Ended <-chan struct{} // closed when the code has stopped after all
}

// Error says which model, and what it still has.
func (e *LostError) Error() string { return ErrLost.Error() + ": " + e.Text }

// Unwrap returns ErrLost.
func (*LostError) Unwrap() error { return ErrLost }

// Dimensions with a meaning in a Port's shape.
const (
	// Free stands for one dimension of any size.
	Free = -1
	// AnyAxes, only as the first entry, stands for any number of leading axes.
	AnyAxes = -2
)

// Values of Info.Rows that count from the end of the shape; others count leading axes.
const (
	// AllAxes: every element is independent of every other (elementwise).
	AllAxes = -1
	// AllButLast: everything but the last axis is independent (linear, norm).
	AllButLast = -2
)

// Port is one named input or output of a model.
type Port struct {
	Name     string
	DTypes   []tensor.DataType // accepted (input) or possible (output); empty: any
	Shape    []int64           // dimensions, Free, AnyAxes; nil: a scalar, {AnyAxes}: any shape
	Whole    bool              // input only: needed whole, before the first row
	Optional bool              // input only: a call may leave it out
}

// Info tells what a model is. It is constant for the model's life.
type Info struct {
	Name    string
	Version string
	Device  string // "cpu", "cuda:0"
	Inputs  []Port // none: the model makes its outputs of nothing, or of Params
	Outputs []Port
	// Rows is how many leading axes are independent of each other: 0 needs the
	// whole tensor, 1 takes each batch item alone, AllAxes is elementwise.
	// Every input that is not Whole, and every output, has the same rows.
	Rows int
	// BlockRows is the preferred number of rows per block; 0 lets the engine choose by bytes.
	BlockRows int64
	Params    []Param // those that a call may have: others are refused
	// Idempotent: a call has no effect but its results, or the same when it is repeated, so
	// that a client may repeat one whose end it did not hear.
	Idempotent bool
	About      map[string]string // what else there is to know of it, such as its layers; read-only
}

// Param is one parameter of a model's calls.
type Param struct {
	Name    string
	Kind    string // what its text is: see Kinds; the model itself checks any other
	Default string // what the model takes for an absent one, for people; empty where that means something else
	Meaning string // a phrase, with the range
}

// Axes returns how many leading axes of a tensor of this rank are rows.
func (i Info) Axes(rank int) int {
	if i.Rows < 0 {
		return max(0, rank+1+i.Rows)
	}
	return min(i.Rows, rank)
}

// Of returns what the model is to a call with these inputs: it has no Optional port that they
// leave out. A run and its blocks know no other.
func (i Info) Of(in []Input) Info {
	if len(in) != len(i.Inputs) {
		i.Inputs = slices.DeleteFunc(slices.Clone(i.Inputs), func(p Port) bool {
			return p.Optional && !slices.ContainsFunc(in, func(in Input) bool { return in.Port == p.Name })
		})
	}
	return i
}

// Input is what a call offers at one port.
type Input struct {
	Port       string
	Desc       tensor.Desc
	ChunkBytes int64             // the size of the chunks it will arrive in, 1 or more
	Name       string            // what the caller calls it, perhaps nothing
	Metadata   map[string]string // what the caller says of it; read-only
}

// Call is one run of a model, as its Open sees it.
type Call struct {
	ID        tensor.ID
	Principal *slab.Principal   // holds the memory that it takes, for fair budgets
	Inputs    []Input           // one for each input port but Optional ones, in the model's order
	Params    map[string]string // as the caller sent them; read-only
	State     State             // of the sequence that the call is a step of; nil: of none, or the model keeps nothing
	// Lifetime ends with the caller's session, or what stands for one: graphs, caches
	// and leases that outlast the call end then. Nil: nothing outlasts the call.
	Lifetime context.Context
}

// Model is something that runs. Safe for concurrent use.
type Model interface {
	Info() Info
	// Open checks the call against the model (errors wrap ErrInput and take no
	// memory), then waits for what the call needs at least, all of it or
	// nothing, and starts the run. Ending ctx cancels the run: a running
	// model stops within one block. A Run returned must be closed.
	Open(ctx context.Context, c Call) (Run, error)
}

// Descs copies the descs of the inputs.
func (c Call) Descs() []tensor.Desc {
	all := make([]tensor.Desc, len(c.Inputs))
	for i, in := range c.Inputs {
		all[i] = in.Desc.Clone()
	}
	return all
}

// Run is one call in progress. Input side: Borrow, Filled. Output side: Next,
// Stats. One goroutine per side, except that Filled may be called by any
// goroutine. Close comes last, from anywhere, once.
type Run interface {
	// Borrow borrows the memory of the next block: first, if the model has Whole
	// inputs, one block with all of them; then rows in ascending order without
	// gaps. It waits for memory. io.EOF follows the last block, and is all that a
	// model without inputs has. A tensor without rows (a zero dimension) is one block
	// of zero rows; where Info.Rows is 0, the only block has each tensor whole.
	Borrow(ctx context.Context) (*Block, error)
	// Filled hands a block back, every byte written, in any order. It never blocks.
	Filled(b *Block)
	// Next returns the next result, in any order. io.EOF means that every
	// output is complete; any other error is why the run failed. A run has
	// memory for as many consecutive bytes of each output as the largest chunk
	// of its inputs has (ChunkBytes without inputs), in at most 256 blocks: who keeps results until a
	// longer piece is complete copies them, or the run stands still.
	Next(ctx context.Context) (Out, error)
	// Stats returns the time spent so far. Safe for concurrent use.
	Stats() Stats
	// Close ends the run, finished or not, and returns when the model's code does not
	// touch borrowed bytes any more, or after a bounded wait with a *LostError. An Out
	// that is not released keeps its memory, which stays charged, until it is.
	Close() error
}

// Widener is a Run that can have more memory.
type Widener interface {
	// Widen lets the run have so many bytes of blocks in each direction, as far as there
	// is memory: more than it has by itself, for a peer that is far away. Safe for
	// concurrent use.
	Widen(bytes int64)
}

// Block is a range of rows of every input that has rows, or all Whole inputs. In is indexed
// as Call.Inputs is; a port that is not part of this block has a nil entry; each other one is
// in one piece. The memory is borrowed until Filled or Close.
type Block struct {
	Row, Rows int64
	Whole     bool // the block of the Whole inputs; Row and Rows are 0
	In        [][]byte
	// Slot belongs to the engine whose memory it is.
	Slot any
}

// Out is a piece of one output. Data is shared, read-only, until Release, which
// the holder runs exactly once, from any goroutine and under any locks of its own:
// it does not block and calls nothing of the holder's.
type Out struct {
	Port    int         // index into Info.Outputs
	Desc    tensor.Desc // of the whole output, the same in each of its pieces
	Off     int64       // bytes from the start of the output
	Data    []byte
	Release func()
}

// Stats is where a run's time went. Times of blocks computed side by side add up.
type Stats struct {
	Queue   time.Duration // waiting for memory in Open
	H2D     time.Duration // host to device copies
	Compute time.Duration
	D2H     time.Duration // device to host copies
	Blocks  int64         // blocks computed
}

// InputError says what a model wanted at a port and what it got. It wraps ErrInput.
type InputError struct {
	Model, Port string
	Want, Got   string
}

// Error returns the whole sentence.
func (e *InputError) Error() string {
	return fmt.Sprintf("engine: model %q, input %q: wanted %s, got %s", e.Model, e.Port, e.Want, e.Got)
}

// Unwrap returns ErrInput.
func (e *InputError) Unwrap() error { return ErrInput }

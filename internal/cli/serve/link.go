package serve

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"runtime"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/looking"
	"github.com/tensorferry/tensorferry/internal/cli/moving"
	"github.com/tensorferry/tensorferry/internal/link"
	"github.com/tensorferry/tensorferry/internal/relay"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/slab"
)

const (
	// linkShare: the memory of a link may be 1/linkShare of the process's memory, but not
	// more than mostLink unless the guest requests it.
	linkShare = 4
	mostLink  = 1 << 30
	// linkHello is how long the process that started the link may take to send its hello.
	linkHello = 10 * time.Second
)

// Link serves a link, whose clients have cfg unless the guest wishes otherwise.
func Link(fd int, cfg client.Config) error {
	socket, err := link.FromFD(fd)
	if err != nil {
		return fail.Mistake(fail.Hinted(err, "libraries start this command; in a shell, use tensorferry run"))
	}
	defer func() { _ = socket.Close() }()
	var quota int64
	guest, err := link.Greet(socket, linkHello, link.Greeting{Version: Version, Role: "client"}, func(wished int64) int64 {
		quota = cmp.Or(max(wished, 0), min(processMemory()/linkShare, mostLink))
		return quota
	})
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
		return nil // the parent has already exited
	}
	if err != nil {
		return err
	}
	stop, err := link.Watch(guest.PID, func() {
		_ = socket.CloseRead()
		_ = socket.CloseWrite() // a writer may be waiting for room
	})
	if err != nil {
		return err
	}
	defer stop()
	heap := link.NewHeap(2*quota + relay.PiecesBytes)
	conn := link.New(socket, link.Config{Heap: heap, Pool: slab.NewPool(quota, heap), Quota: slab.NewBudget("link memory", quota)})
	defer conn.Close()
	return relay.Serve(conn, relay.Config{
		Client: cfg, Explain: explain, Processors: runtime.GOMAXPROCS(0),
		Dial: func(target string, cfg client.Config) (*client.Client, error) {
			cfg.Credentials = brief{cmp.Or(cfg.Credentials, insecure.NewCredentials())}
			return client.Dial(target, cfg)
		},
		Verbs: map[string]relay.Verb{
			"info": linked("", looking.Info), "models": linked("models", looking.Models), "list": linked("", linkedList), "delete": linked("names", linkedDelete),
		},
	})
}

// brief are credentials that make connections link.Brief ones.
type brief struct {
	credentials.TransportCredentials
}

// ClientHandshake secures a connection.
func (b brief) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return b.TransportCredentials.ClientHandshake(ctx, authority, link.Brief(raw))
}

// Clone returns a copy.
func (b brief) Clone() credentials.TransportCredentials { return brief{b.TransportCredentials.Clone()} }

// linked makes a verb of a command, whose JSON it puts under a name, if it has one.
func linked(name string, command func(context.Context, *client.Client, []string, display.Printer) error) relay.Verb {
	return func(ctx context.Context, c *client.Client, args []string, w io.Writer) error {
		if name == "" {
			return command(ctx, c, args, display.NewPrinter(w, true))
		}
		var b bytes.Buffer
		if err := command(ctx, c, args, display.NewPrinter(&b, true)); err != nil {
			return err
		}
		return display.JSON(w, map[string]json.RawMessage{name: b.Bytes()})
	}
}

// linkedList answers list with the tensors that match a glob, or all; there may be none.
func linkedList(ctx context.Context, c *client.Client, globs []string, out display.Printer) error {
	list, sources, err := c.List(ctx, strings.Join(globs, ""))
	if err != nil {
		return err
	}
	return out.Print(map[string]any{"tensors": moving.StoredJSONs(list), "sources": sources}, nil)
}

func linkedDelete(ctx context.Context, c *client.Client, names []string, out display.Printer) error {
	removed, err := c.Delete(ctx, names...)
	if err != nil {
		return err
	}
	return out.Print(append([]string{}, removed...), nil)
}

// explain converts an error for a library, whose users do not see this program.
func explain(err error) relay.Failure {
	var e *client.Error
	switch {
	case errors.Is(err, slab.ErrBudget), errors.Is(err, slab.ErrMemory):
		return relay.Failure{Message: fail.Text(err), Code: uint16(codes.ResourceExhausted)}
	case errors.Is(err, client.ErrInput):
		return relay.Failure{Message: fail.Text(err), Code: uint16(codes.InvalidArgument)}
	case !errors.As(err, &e):
		return relay.Failure{Message: fail.Text(err), Code: uint16(status.FromContextError(err).Code())}
	}
	f := relay.Failure{Message: fail.Text(err), Code: uint16(e.Code), RetryMillis: e.RetryAfter.Milliseconds(), Retryable: e.Retryable(), Reason: string(e.Why())}
	if !e.Call.IsZero() {
		f.Call = e.Call.String()
	}
	switch row := e.Row(); {
	case strings.Contains(row.Do, reason.Flag):
		f.Hint = "is the server running? tensorferry serve starts one"
	case row.Code == "NOT_FOUND":
		f.Hint = "models() and list() show what the server has"
	default:
		f.Hint = strings.ReplaceAll(row.Do, reason.Asked, "")
	}
	return f
}

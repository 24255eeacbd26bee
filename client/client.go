// Package client runs models on a server: many calls per session, with inputs from slices
// and readers, and results into slices and writers, whole or in regions as they arrive. It
// pushes tensors to the server's store, and pulls, lists and deletes them.
//
// It does not compute. A Client, a Session and a Call are safe for concurrent use.
// Inputs are shared with the library until their call or Push has ended; results belong to
// the caller.
package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/keepalive"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client/retry"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/calling"
	"github.com/tensorferry/tensorferry/internal/lane"
	"github.com/tensorferry/tensorferry/internal/lanes"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// Config of a client. The zero value works.
type Config struct {
	// ChunkBytes is the size of the chunks sent and the largest accepted, in bytes, 1 to 4
	// MiB; 0 means 1 MiB, and 256 KiB sent where the round trip is 10 ms or more. A server
	// with a lower limit gets smaller chunks.
	ChunkBytes int
	// Checksum selects the checksum of every chunk; 0 means codec.Fastest() on this machine.
	Checksum codec.Checksum
	// Codec compresses the chunks sent, if the server supports it and they get smaller, and
	// lets the server compress results; 0 means codec.None. See docs/wire.md for when
	// compression pays off.
	Codec codec.Codec
	// OpenTimeout limits the opening of a session, and each metadata RPC; 0 means 10 s.
	OpenTimeout time.Duration
	// Wait is how long a new session, and each metadata RPC, waits for a server that cannot be
	// reached. 0 means not at all: the first attempt to connect decides.
	Wait time.Duration
	// Retry has calls, pushes, pulls and metadata RPCs repeated that may be (docs/retries.md);
	// nil means none. No attempt begins later than RetryFor after the first one; 0 means 60 s.
	// The error is that of the last attempt.
	Retry    retry.Policy
	RetryFor time.Duration
	// BreakAfter is after how many attempts in a row, of all callers, that found no server, or
	// one that takes nothing more, calls fail at once with ErrCircuitOpen. After ten seconds one
	// attempt is made; if that succeeds, all are again. 0 means never.
	BreakAfter int
	// StallTimeout is how long a push or a pull waits for a server that makes no progress;
	// 0 means 60 s. Time spent in the caller's readers and writers does not count. Each 32
	// MiB that the server reads or syncs without sending anything, such as held ranges,
	// adds 1 s.
	StallTimeout time.Duration
	// InputIdle is how long the caller's Reader, Next or Writer may block before its call,
	// push or pull ends; 0 leaves the limit to the server, 1 h by default. While one
	// blocks, the client tells the server that it is alive and waiting.
	InputIdle time.Duration
	// Idled, if not nil, is called when a call, push or pull fails while the caller's
	// Reader, Next or Writer blocks: Wait, Push and Pull return only after that has
	// returned. Idled must not block.
	Idled func(error)
	// WindowBytes is how many bytes the server may send before the client reads them; 0
	// means 2 MiB, less than 64 KiB means 64 KiB. Raise it, and the server's, if bandwidth
	// times round-trip time exceeds it.
	WindowBytes int
	// Credentials secure the connection; nil means no encryption. PerRPC, such as a token,
	// are sent with every RPC if not nil.
	Credentials credentials.TransportCredentials
	PerRPC      credentials.PerRPCCredentials
	// Lanes is the most lanes that a session has for large tensors, next to its gRPC stream
	// (docs/lanes.md); 0 means 64, which is the maximum. A negative number means none. A
	// session has one within a machine, and elsewhere as many as make it faster; with
	// FixedLanes, it has as many as the server allows up to Lanes.
	Lanes      int
	FixedLanes bool
	// BBR has connections send by the congestion control BBR, which does not take each lost
	// packet for a full line. Where the kernel does not allow it, they fail. A route's own
	// congestion control (ip route … congctl) takes precedence.
	BBR bool
	// ResultBytes is the largest result that gets memory of its own; 0 means 4 GiB. Into
	// and Writer have no such limit.
	ResultBytes int64

	dial     func(ctx context.Context, network, address string) (net.Conn, error) // a test's; nil means the system's
	farChunk int                                                                  // of those sent to a server that is far
}

// Client is a connection to a server. Close it when done.
type Client struct {
	cfg    Config
	target string
	dials  dials
	conn   *grpc.ClientConn
	stub   pb.TensorServiceClient
	pool   *slab.Pool
	lanes  lanes.Known
	tally  *tally
	open   *breaker // nil: there is none

	authority *atomic.Value // a string: whose certificate the server has, by gRPC; noted sets it

	opening chan struct{} // held while shared is used
	shared  *Session      // of Compute, Push and Pull; guarded by opening

	closing    context.Context // ends with Close
	end        context.CancelCauseFunc
	disconnect func() error // closes conn, once
	mu         sync.Mutex   // orders the beginnings of sessions and the end of closing
	winding    sync.WaitGroup
}

// Dial returns a client for a server at host:port, or at a Unix socket as unix:/path. It
// does not connect; the first use does.
func Dial(target string, cfg Config) (c *Client, err error) {
	if cfg.ChunkBytes < 0 || cfg.ChunkBytes > 4<<20 {
		return nil, fmt.Errorf("client: ChunkBytes is %d; it must be 1 to %d, or 0 for 1 MiB", cfg.ChunkBytes, 4<<20)
	}
	cfg.farChunk = cmp.Or(cfg.ChunkBytes, farChunk)
	cfg.ChunkBytes = cmp.Or(cfg.ChunkBytes, 1<<20)
	cfg.Checksum = cmp.Or(cfg.Checksum, codec.Fastest())
	if !cfg.Checksum.Valid() {
		return nil, fmt.Errorf("client: Checksum is %d; use 1 (CRC-32C) or 2 (CRC-32)", cfg.Checksum)
	}
	if !cfg.Codec.Known() {
		return nil, fmt.Errorf("client: Codec is %d; use 0 (none) or 1 (lz4)", cfg.Codec)
	}
	cfg.Lanes = min(cmp.Or(cfg.Lanes, mostLanes), mostLanes)
	cfg.OpenTimeout = cmp.Or(max(0, cfg.OpenTimeout), DefaultOpenTimeout)
	cfg.InputIdle, cfg.Wait = max(0, cfg.InputIdle), max(0, cfg.Wait)
	cfg.RetryFor = cmp.Or(max(0, cfg.RetryFor), DefaultRetryFor)
	cfg.StallTimeout = cmp.Or(max(0, cfg.StallTimeout), DefaultStallTimeout)
	cfg.ResultBytes = cmp.Or(max(0, cfg.ResultBytes), DefaultResultBytes)
	cfg.WindowBytes = cmp.Or(max(0, cfg.WindowBytes), DefaultWindow)
	cfg.WindowBytes = min(max(cfg.WindowBytes, 64<<10), math.MaxInt32)
	if err := checkAddress(target); err != nil {
		return nil, err
	}
	if cfg.Idled == nil {
		cfg.Idled = func(error) {}
	}
	if cfg.Credentials == nil {
		cfg.Credentials = insecure.NewCredentials()
	}
	c = &Client{target: target, tally: newTally(), open: newBreaker(cfg.BreakAfter), authority: new(atomic.Value), dials: dials{news: make(chan struct{})}, pool: slab.NewPool(poolBytes, slab.System), opening: make(chan struct{}, 1)}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(noted{cfg.Credentials, c}),
		grpc.WithContextDialer(c.dial),
		grpc.WithChainUnaryInterceptor(c.unary),
		grpc.WithChainStreamInterceptor(c.streams),
		grpc.WithNoProxy(),
		experimental.WithBufferPool(wire.Buffers),
		grpc.WithInitialWindowSize(int32(cfg.WindowBytes)),
		grpc.WithInitialConnWindowSize(int32(cfg.WindowBytes)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second, PermitWithoutStream: true}),
		grpc.WithDefaultCallOptions(
			grpc.ForceCodecV2(wire.Codec{}),
			grpc.MaxCallRecvMsgSize(cfg.ChunkBytes+wire.MaxControlBytes),
			grpc.MaxCallSendMsgSize(math.MaxInt32),
			// gRPC buffers the first messages of a stream for a retry, which could not
			// restore a session.
			grpc.MaxRetryRPCBufferSize(0),
		),
	}
	if cfg.PerRPC != nil {
		options = append(options, grpc.WithPerRPCCredentials(cfg.PerRPC))
	}
	if cfg.BBR && !strings.HasPrefix(target, "unix:") {
		cfg.dial = (&net.Dialer{Control: lane.BBR}).DialContext
	}
	if cfg.dial == nil {
		cfg.dial = new(net.Dialer).DialContext
	}
	if c.cfg = cfg; !strings.HasPrefix(target, "unix:") {
		target = "passthrough:///" + target // each dial looks the name up
	}
	if c.conn, err = grpc.NewClient(target, options...); err != nil {
		return nil, fmt.Errorf("client: %q is not an address: %w; write host:port or unix:/path", target, err)
	}
	c.stub, c.disconnect = pb.NewTensorServiceClient(c.conn), sync.OnceValue(c.conn.Close)
	c.closing, c.end = context.WithCancelCause(context.Background())
	return c, nil
}

// checkAddress rejects targets that gRPC would resolve as names.
func checkAddress(target string) error {
	if path, ok := strings.CutPrefix(target, "unix:"); ok && strings.Trim(path, "/") != "" {
		return nil
	}
	host, port, err := net.SplitHostPort(target)
	if err == nil && !strings.ContainsAny(host, "/\x00") {
		if n, err := strconv.ParseUint(port, 10, 16); err == nil && n > 0 {
			return nil
		}
	}
	return fmt.Errorf("client: %q is not an address; write host:port or unix:/path", target)
}

// Close ends every session and the connection, and waits for them. Closing twice is a no-op.
func (c *Client) Close() error {
	c.mu.Lock()
	c.end(ErrClosed)
	c.mu.Unlock()
	err := c.disconnect() // also for sessions that are being opened
	c.winding.Wait()
	return err
}

// Compute runs a model with one input and one result, on a session that the client keeps
// for this. It shares x until it returns; the result belongs to the caller. The call has the
// params of all maps.
func (c *Client) Compute(ctx context.Context, model string, x tensor.Tensor, params ...map[string]string) (tensor.Tensor, error) {
	return compute(ctx, c.Call, model, x, params)
}

func (c *Client) sharedSession(ctx context.Context) (*Session, error) {
	select { // one opens it, the others wait
	case c.opening <- struct{}{}:
		defer func() { <-c.opening }()
	case <-ctx.Done():
		return nil, calling.CauseError(context.Cause(ctx))
	}
	if c.shared != nil && c.shared.on.Cause() == nil && !c.shared.on.Status().Draining {
		return c.shared, nil
	}
	s, err := c.Session(ctx)
	if err != nil {
		c.tally.attempts.Add(1)
		c.tally.ended(calling.CodeOf(err), 0, 0, 0, 0)
		if own, ok := errors.AsType[*Error](err); ok {
			err = calling.AsRefused(own)
		}
		return nil, err
	}
	if c.cfg.Retry != nil { // now, because nobody tells when a call has failed
		models, _ := c.Models(ctx) // without an answer, none is idempotent
		s.idempotent = make(map[string]bool, len(models))
		for _, m := range models {
			s.idempotent[m.Name] = m.Idempotent
		}
	}
	c.shared = s
	return s, nil
}

// storingSession returns the shared session, for a push or a pull.
func (c *Client) storingSession(ctx context.Context) (*Session, error) {
	s, err := c.sharedSession(ctx)
	if err == nil && !s.on.Status().PeerStores {
		return nil, &Error{Code: codes.Unimplemented, Message: "the sessions of this server do not store tensors: it is older than this client supports"}
	}
	return s, err
}

// Kept returns how many bytes of unused memory the client keeps for reuse, at most 64 MiB.
func (c *Client) Kept() int64 { return c.pool.Kept() }

// ask calls a unary RPC, with OpenTimeout as its limit.
func ask[Q, A any](ctx context.Context, c *Client, call func(context.Context, Q, ...grpc.CallOption) (A, error), q Q) (a A, err error) {
	once := func() error {
		settled, err := c.attempt()
		if err != nil {
			return err
		}
		ctx, stop := context.WithTimeoutCause(ctx, c.cfg.Wait+c.cfg.OpenTimeout, c.noAnswer())
		defer stop()
		if a, err = call(ctx, q); err != nil {
			own := c.sessionError(cmp.Or(context.Cause(ctx), context.Cause(c.closing), err))
			own.Refused, err = notSent(err), own
		}
		settled(err)
		return err
	}
	v := questions
	if _, is := any(q).(*pb.DeleteTensorsRequest); is {
		v = deletes
	}
	err = c.tries().repeat(ctx, v, once, nil)
	return a, err
}

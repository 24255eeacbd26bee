// Command goend is the Go client of the benchmarks in Python: package client as its users
// have it, with every default, and clients of the drop-in services. It reads lines such as
// "kpu_echo ADDRESS 67108864 5", what to do with how many bytes how often, and answers
// with JSON.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"os"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	kpupb "github.com/tensorferry/tensorferry/api/kpu/torch/server"
	splitpb "github.com/tensorferry/tensorferry/api/splitlearn/comm"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/torchsave"
	"github.com/tensorferry/tensorferry/tensor"
)

const chunk = 1 << 20

// answer is what is said of a line.
type answer struct {
	Seconds []float64 `json:"seconds"`
	First   float64   `json:"first,omitempty"` // seconds until the first result
}

// work does something once with the bytes of a tensor, and returns when the first result came,
// and the last.
type work func(ctx context.Context, to *server, data []byte) (first, last time.Time, err error)

var works = map[string]work{
	"sink": ferry("sink"), "echo": ferry("echo"), "worker": ferry("worker"),
	"kpu_upload": upload, "kpu_echo": echo, "kpu_first": echo, "split_echo": compute,
}

// server is one that has been dialed, in two ways that connect when they are used.
type server struct {
	*grpc.ClientConn
	ferry *client.Client
}

// data is what was sent last, so that its pages have been touched.
var data []byte

func main() {
	conns := make(map[string]*server)
	fmt.Println("ready")
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		a, err := do(conns, lines.Text())
		text, bad := json.Marshal(a)
		if err = errors.Join(err, bad); err != nil {
			fmt.Fprintf(os.Stderr, "goend: %s: %v\n", lines.Text(), err)
			os.Exit(1)
		}
		fmt.Println(string(text))
	}
}

func do(conns map[string]*server, line string) (a answer, err error) {
	var name, address string
	var size, count int
	if _, err := fmt.Sscan(line, &name, &address, &size, &count); err != nil || works[name] == nil {
		return a, fmt.Errorf("not a line of WORK ADDRESS BYTES COUNT: %w", err)
	}
	to := conns[address]
	if to == nil {
		to = new(server)
		to.ClientConn, err = grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithInitialWindowSize(4<<20), grpc.WithInitialConnWindowSize(4<<20),
			grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32)))
		if err == nil {
			to.ferry, err = client.Dial(address, client.Config{})
		}
		if err != nil {
			return a, err
		}
		conns[address] = to
	}
	if len(data) != size&^7 {
		data = bytes.Repeat([]byte{0, 0, 0x80, 0x3f, 1, 2, 3, 0x40}, size/8)
	}
	for range count {
		for i := 0; i < len(data); i += 4 << 10 {
			data[i]++ // so that an earlier result does not match
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		begin := time.Now()
		first, last, err := works[name](ctx, to, data)
		cancel()
		if err != nil {
			return a, err
		}
		a.First = first.Sub(begin).Seconds()
		a.Seconds = append(a.Seconds, last.Sub(begin).Seconds())
	}
	return a, nil
}

// ferry runs a model of tensorferry, whose result is compared after the time.
func ferry(model string) work {
	return func(ctx context.Context, to *server, data []byte) (first, last time.Time, err error) {
		y, err := to.ferry.Compute(ctx, model, bench.Floats(data))
		last = time.Now()
		want := data
		if model == "sink" {
			want = binary.LittleEndian.AppendUint64(nil, uint64(len(data)))
		}
		if err == nil && !bytes.Equal(y.Data, want) {
			err = fmt.Errorf("model %s computes something else", model)
		}
		return last, last, err
	}
}

// late reads bytes that are made when it is their turn.
type late func() []byte

func (l *late) Read(p []byte) (int, error) {
	b := (*l)()
	n := copy(p, b)
	*l = func() []byte { return b[n:] }
	if len(b) == 0 {
		return 0, io.EOF
	}
	return n, nil
}

// send cuts the file of a tensor and sends it.
func send(data []byte, to func(*kpupb.TensorChunk) error) error {
	d := tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{int64(len(data)) / 4}}
	p, err := torchsave.Bare(d)
	if err != nil {
		return err
	}
	size := int(p.Size())
	sum := crc32.NewIEEE()
	tail := late(func() []byte { return p.Gap(1, []uint32{sum.Sum32()}) })
	file := io.MultiReader(bytes.NewReader(p.Gap(0, nil)), io.TeeReader(bytes.NewReader(data), sum), &tail)
	total := (size + chunk - 1) / chunk
	for i := range total {
		m := &kpupb.TensorChunk{TensorId: "x", ChunkNumber: uint32(i), TotalChunks: uint32(total), IsLast: i == total-1}
		m.Data = make([]byte, min(chunk, size-i*chunk))
		if _, err := io.ReadFull(file, m.Data); err != nil {
			return err
		}
		if i == 0 {
			m.Metadata = map[string]string{"shape": fmt.Sprint(d.Shape), "dtype": "torch.float32", "device": "cpu", "size_bytes": strconv.Itoa(size)}
		}
		if err := to(m); err != nil {
			return err
		}
	}
	return nil
}

func upload(ctx context.Context, to *server, data []byte) (first, last time.Time, err error) {
	s, err := kpupb.NewServiceClient(to).ReceiveTensors(ctx)
	if err != nil {
		return first, last, err
	}
	if err := send(data, s.Send); err != nil {
		return first, last, err
	}
	r, err := s.CloseAndRecv()
	if err == nil && !r.GetSuccess() {
		err = fmt.Errorf("%s", r.GetMessage())
	}
	last = time.Now()
	return last, last, err
}

func echo(ctx context.Context, to *server, data []byte) (first, last time.Time, err error) {
	s, err := kpupb.NewServiceClient(to).StreamTensors(ctx)
	if err != nil {
		return first, last, err
	}
	sent := make(chan error, 1)
	go func() {
		err := send(data, s.Send)
		_ = s.CloseSend()
		sent <- err
	}()
	r := torchsave.NewReader(1 << 40)
	got := make([]byte, 0, len(data)) // assembled, as a client has to
	for {
		m, err := s.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return first, last, err
		}
		if first.IsZero() {
			first = time.Now()
		}
		for rest := m.GetData(); len(rest) > 0; {
			var part []byte
			if part, rest, err = r.Next(rest); err != nil {
				return first, last, err
			}
			got = append(got, part...)
		}
	}
	if err := r.Close(); err != nil {
		return first, last, err
	}
	if !bytes.Equal(got, data) {
		return first, last, fmt.Errorf("another tensor came back")
	}
	err = <-sent
	return first, time.Now(), err
}

func compute(ctx context.Context, to *server, data []byte) (first, last time.Time, err error) {
	r, err := splitpb.NewComputeServiceClient(to).Compute(ctx, &splitpb.ComputeRequest{Data: data, Shape: []int32{int32(len(data) / 4)}})
	if err == nil && !bytes.Equal(r.GetData(), data) {
		err = fmt.Errorf("another tensor came back")
	}
	last = time.Now()
	return last, last, err
}

package identity_test

import (
	"context"
	"fmt"
	"log"
	"log/slog"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/server"
)

func ExampleClientFiles() {
	creds, perRPC, err := identity.ClientFiles{CA: "ca.pem", Token: "token"}.Credentials()
	if err != nil {
		log.Fatal(err)
	}
	c, err := client.Dial("ferry.example.org:50051", client.Config{Credentials: creds, PerRPC: perRPC})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	models, err := c.Models(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(len(models), "models")
}

func ExampleNewServer() {
	id, err := identity.NewServer(identity.ServerFiles{Cert: "server.pem", Key: "server-key.pem", Tokens: "tokens"}, slog.Default())
	if err != nil {
		log.Fatal(err)
	}
	cfg := server.Config{Credentials: id.Credentials(), Identify: id.Principal}
	_ = cfg // Models, Pool, Budget, and then server.New
}

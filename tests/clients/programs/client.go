// The HTTP client of Go with its defaults. See ../programs.py for the arguments.

package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strconv"
	"strings"
)

type answer struct {
	status int
	body   []byte
}

func request(ctx context.Context, expect bool) *http.Request {
	var body io.Reader
	if os.Args[5] != "-" {
		data, err := os.ReadFile(os.Args[5])
		check(err)
		body = bytes.NewReader(data)
	}
	made, err := http.NewRequestWithContext(ctx, os.Args[2], os.Args[3], body)
	check(err)
	made.Header.Set("Authorization", "Bearer "+os.Args[4])
	if body != nil {
		made.Header.Set("Content-Type", "application/json")
	}
	if expect {
		made.Header.Set("Expect", "100-continue")
	}
	return made
}

func send(expect bool) answer {
	response, err := http.DefaultClient.Do(request(context.Background(), expect))
	check(err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	check(err)
	return answer{response.StatusCode, body}
}

func main() {
	mode := os.Args[1]
	count, err := strconv.Atoi(os.Args[6])
	check(err)
	told := make([]byte, 1)
	switch mode {
	case "each", "expect":
		for i := 0; i < count; i++ {
			show(send(mode == "expect"))
		}
	case "together":
		answers := make(chan answer)
		for i := 0; i < count; i++ {
			go func() { answers <- send(false) }()
		}
		for i := 0; i < count; i++ {
			show(<-answers)
		}
	case "abort":
		ctx, cancel := context.WithCancel(context.Background())
		response, err := http.DefaultClient.Do(request(ctx, false))
		check(err)
		lines := bufio.NewReader(response.Body)
		line := ""
		for !strings.HasPrefix(line, "data: ") {
			line, err = lines.ReadString('\n')
			check(err)
		}
		fmt.Print(line)
		cancel()
		os.Stdin.Read(told)
	case "leave":
		ctx, cancel := context.WithCancel(context.Background())
		go http.DefaultClient.Do(request(ctx, false))
		os.Stdin.Read(told)
		cancel()
		os.Stdin.Read(told)
	default:
		log.Fatal(mode)
	}
}

func show(given answer) {
	fmt.Printf("%d %d\n%s\n", given.status, len(given.body), given.body)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

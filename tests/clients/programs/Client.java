// The HTTP client of the JDK with its defaults, which ask for HTTP/2 by an upgrade. See ../programs.py for the arguments.

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;

public class Client {
    public static void main(String[] args) throws Exception {
        String mode = args[0];
        int count = Integer.parseInt(args[5]);
        HttpRequest request = request(args, mode.equals("expect"));
        HttpClient client = HttpClient.newHttpClient();
        switch (mode) {
            case "each", "expect" -> {
                for (int i = 0; i < count; i++) {
                    print(client.send(request, BodyHandlers.ofByteArray()));
                }
            }
            case "together" -> {
                List<CompletableFuture<HttpResponse<byte[]>>> all = new ArrayList<>();
                for (int i = 0; i < count; i++) {
                    all.add(client.sendAsync(request, BodyHandlers.ofByteArray()));
                }
                for (CompletableFuture<HttpResponse<byte[]>> one : all) {
                    print(one.get());
                }
            }
            case "abort" -> {
                HttpResponse<java.io.InputStream> response = client.send(request, BodyHandlers.ofInputStream());
                BufferedReader lines =
                    new BufferedReader(new InputStreamReader(response.body(), StandardCharsets.UTF_8));
                String line = lines.readLine();
                while (!line.startsWith("data: ")) {
                    line = lines.readLine();
                }
                System.out.println(line);
                response.body().close();
                System.in.read();
            }
            case "leave" -> {
                CompletableFuture<HttpResponse<byte[]>> running = client.sendAsync(request, BodyHandlers.ofByteArray());
                System.in.read();
                running.cancel(true);
                System.in.read();
            }
            default -> throw new IllegalArgumentException(mode);
        }
        System.exit(0);
    }

    static HttpRequest request(String[] args, boolean expect) throws IOException {
        HttpRequest.Builder builder = HttpRequest.newBuilder(URI.create(args[2]));
        builder.header("Authorization", "Bearer " + args[3]).expectContinue(expect);
        if (args[4].equals("-")) {
            return builder.method(args[1], HttpRequest.BodyPublishers.noBody()).build();
        }
        builder.header("Content-Type", "application/json");
        return builder.method(args[1], HttpRequest.BodyPublishers.ofFile(Path.of(args[4]))).build();
    }

    static void print(HttpResponse<byte[]> response) throws IOException {
        System.out.println(response.statusCode() + " " + response.body().length);
        System.out.write(response.body());
        System.out.println();
        System.out.flush();
    }
}

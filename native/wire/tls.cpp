// Some functions that read parts of a BIO are deprecated from OpenSSL 3.5 on, but have no replacement.
#define OPENSSL_SUPPRESS_DEPRECATED
#include "wire/tls.hpp"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "core/error.hpp"

namespace farpool {

namespace {

// Bytes read from the socket at once: several records, so that a transfer needs fewer system calls.
constexpr std::size_t read_ahead_nbytes = std::size_t{128} << 10;

template <typename Object, void (*Free)(Object*)>
struct Freed {
    void operator()(Object* object) const noexcept { Free(object); }
};
template <typename Object, void (*Free)(Object*)>
using Owned = std::unique_ptr<Object, Freed<Object, Free>>;

void free_bio(BIO* bio) { BIO_free(bio); }
using Text = Owned<BIO, free_bio>;
using Certificate = Owned<X509, X509_free>;
using Key = Owned<EVP_PKEY, EVP_PKEY_free>;

std::string reason_of(unsigned long error) {
    const char* text = ERR_reason_error_string(error);
    return text != nullptr ? text : "unknown reason";
}

[[noreturn]] void refuse(const std::string& what) {
    const std::string reason = reason_of(ERR_peek_last_error());
    ERR_clear_error();
    fail_value(what + " (" + reason + ")");
}

Text as_text(const std::string& text) { return Text(BIO_new_mem_buf(text.data(), static_cast<int>(text.size()))); }

// Reads the next certificate of a text; null at the end.
Certificate next_certificate(const Text& text, const char* what) {
    Certificate found(PEM_read_bio_X509(text.get(), nullptr, nullptr, nullptr));
    if (found == nullptr && ERR_GET_REASON(ERR_peek_last_error()) != PEM_R_NO_START_LINE) {
        refuse(std::string(what) + " is no certificate in PEM");
    }
    ERR_clear_error();
    return found;
}

std::string date_of(const ASN1_TIME* time) {
    const Text text(BIO_new(BIO_s_mem()));
    char* data = nullptr;
    ASN1_TIME_print(text.get(), time);
    const long nbytes = BIO_get_mem_data(text.get(), &data);
    return {data, static_cast<std::size_t>(std::max(nbytes, 0L))};
}

void require_valid(X509* certificate) {
    if (X509_cmp_current_time(X509_get0_notBefore(certificate)) > 0) {
        fail_value("the certificate is not valid before " + date_of(X509_get0_notBefore(certificate)));
    }
    if (X509_cmp_current_time(X509_get0_notAfter(certificate)) < 0) {
        fail_value("the certificate expired on " + date_of(X509_get0_notAfter(certificate)));
    }
}

// OpenSSL accepts a certificate without extended key usage in both roles, so a thief could run a node with a client's one. We
// require the role in it: clientAuth from a client, serverAuth from a node.
int require_role(int is_accepted, X509_STORE_CTX* chain) {
    if (is_accepted != 1 || X509_STORE_CTX_get_error_depth(chain) != 0) {
        return is_accepted;
    }
    X509* const certificate = X509_STORE_CTX_get_current_cert(chain);
    auto* const ssl = static_cast<SSL*>(X509_STORE_CTX_get_ex_data(chain, SSL_get_ex_data_X509_STORE_CTX_idx()));
    const std::uint32_t role = SSL_is_server(ssl) == 1 ? XKU_SSL_CLIENT : XKU_SSL_SERVER;
    if (X509_get_ext_by_NID(certificate, NID_ext_key_usage, -1) >= 0 &&
        (X509_get_extended_key_usage(certificate) & role) != 0) {
        return 1;
    }
    X509_STORE_CTX_set_error(chain, X509_V_ERR_INVALID_PURPOSE);
    return 0;
}

int no_password(char*, int, int, void*) { return -1; }

// Sends without SIGPIPE, with which a plain write would end the program if the other side has closed.
int write_quietly(BIO* bio, const char* data, int nbytes) {
    if (BIO_get_ktls_send(bio)) {
        return BIO_meth_get_write(BIO_s_socket())(bio, data, nbytes);  // it can tell the kernel the kind of a record
    }
    int fd = -1;
    BIO_get_fd(bio, &fd);
    BIO_clear_retry_flags(bio);
    const auto* session = static_cast<const TlsSession*>(BIO_get_app_data(bio));
    const int flags = MSG_DONTWAIT | MSG_NOSIGNAL | (session->more_follows() ? MSG_MORE : 0);
    const ssize_t sent = send(fd, data, static_cast<std::size_t>(nbytes), flags);
    if (sent < 0 && (errno == EAGAIN || errno == EINTR)) {
        BIO_set_retry_write(bio);
    }
    return static_cast<int>(sent);
}

const BIO_METHOD* quiet_socket() {
    static BIO_METHOD* const made = [] {
        BIO_METHOD* method = BIO_meth_new(BIO_TYPE_SOCKET, "farpool socket");
        const BIO_METHOD* socket = BIO_s_socket();
        BIO_meth_set_write(method, write_quietly);
        BIO_meth_set_read(method, BIO_meth_get_read(socket));
        BIO_meth_set_ctrl(method, BIO_meth_get_ctrl(socket));
        BIO_meth_set_create(method, BIO_meth_get_create(socket));
        BIO_meth_set_destroy(method, BIO_meth_get_destroy(socket));
        return method;
    }();
    return made;
}

bool is_about_our_certificate(int reason) {
    constexpr std::array<int, 8> reasons{
        SSL_R_TLSV13_ALERT_CERTIFICATE_REQUIRED,   SSL_R_TLSV1_ALERT_UNKNOWN_CA,          SSL_R_SSLV3_ALERT_BAD_CERTIFICATE,
        SSL_R_SSLV3_ALERT_CERTIFICATE_EXPIRED,     SSL_R_SSLV3_ALERT_CERTIFICATE_REVOKED, SSL_R_SSLV3_ALERT_CERTIFICATE_UNKNOWN,
        SSL_R_SSLV3_ALERT_UNSUPPORTED_CERTIFICATE, SSL_R_TLSV1_ALERT_ACCESS_DENIED,
    };
    return std::find(reasons.begin(), reasons.end(), reason) != reasons.end();
}

}  // namespace

bool tls_available() noexcept { return true; }

TlsContext::TlsContext(const std::string& certificate, const std::string& key, const std::string& authority) {
    ERR_clear_error();
    Owned<SSL_CTX, SSL_CTX_free> made(SSL_CTX_new(TLS_method()));
    if (made == nullptr) {
        refuse("OpenSSL cannot make a TLS context");
    }
    SSL_CTX* context = made.get();
    SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION);
    SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION);
    // All three are strong; the first is the fastest if the processor has instructions for AES, as all servers have.
    SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256");
    SSL_CTX_set_options(context, SSL_OP_CIPHER_SERVER_PREFERENCE | SSL_OP_NO_TICKET | SSL_OP_ENABLE_KTLS);
    // A partial write ends with a record, so that at most one record has to be sent again.
    SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_NO_AUTO_CHAIN);
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_num_tickets(context, 0);
    SSL_CTX_set_read_ahead(context, 1);
    SSL_CTX_set_default_read_buffer_len(context, read_ahead_nbytes);
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, require_role);

    const Text chain = as_text(certificate);
    const Certificate own = next_certificate(chain, "the certificate");
    if (own == nullptr) {
        fail_value("the certificate's file has no certificate in PEM");
    }
    require_valid(own.get());
    if (SSL_CTX_use_certificate(context, own.get()) != 1) {
        refuse("the certificate cannot be used");
    }
    while (Certificate between = next_certificate(chain, "a certificate behind the first one")) {
        if (SSL_CTX_add1_chain_cert(context, between.get()) != 1) {
            refuse("a certificate behind the first one cannot be used");
        }
    }
    const Text key_text = as_text(key);
    const Key own_key(PEM_read_bio_PrivateKey(key_text.get(), nullptr, no_password, nullptr));
    if (own_key == nullptr) {
        refuse("the private key's file has no private key in PEM without a password");
    }
    if (SSL_CTX_use_PrivateKey(context, own_key.get()) != 1) {
        refuse("the private key does not belong to the certificate");
    }
    const Text authorities = as_text(authority);
    bool any = false;
    while (Certificate one = next_certificate(authorities, "the authority's certificate")) {
        any = true;
        if (X509_STORE_add_cert(SSL_CTX_get_cert_store(context), one.get()) != 1) {
            refuse("the authority's certificate cannot be used");
        }
    }
    if (!any) {
        fail_value("the authority's file has no certificate in PEM");
    }
    context_ = made.release();
}

TlsContext::~TlsContext() { SSL_CTX_free(context_); }

std::unique_ptr<TlsSession> TlsContext::begin(int fd) const {
    ERR_clear_error();
    Owned<SSL, SSL_free> ssl(SSL_new(context_));
    BIO* socket = ssl != nullptr ? BIO_new(quiet_socket()) : nullptr;
    if (socket == nullptr) {
        refuse("OpenSSL cannot make a TLS session");
    }
    BIO_set_fd(socket, fd, BIO_NOCLOSE);
    SSL_set_bio(ssl.get(), socket, socket);
    auto session = std::make_unique<TlsSession>(ssl.release());
    BIO_set_app_data(socket, session.get());
    return session;
}

std::unique_ptr<TlsSession> TlsContext::connect(int fd, const std::string& host) const {
    std::unique_ptr<TlsSession> session = begin(fd);
    SSL* ssl = session->ssl();
    X509_VERIFY_PARAM* expected = SSL_get0_param(ssl);
    X509_VERIFY_PARAM_set_hostflags(expected, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
    if (X509_VERIFY_PARAM_set1_ip_asc(expected, host.c_str()) != 1) {
        if (host.empty() || SSL_set1_host(ssl, host.c_str()) != 1 || SSL_set_tlsext_host_name(ssl, host.c_str()) != 1) {
            refuse("'" + host + "' is no name that a node's certificate can have");
        }
    }
    ERR_clear_error();
    SSL_set_connect_state(ssl);
    return session;
}

std::unique_ptr<TlsSession> TlsContext::accept(int fd) const {
    std::unique_ptr<TlsSession> session = begin(fd);
    SSL_set_accept_state(session->ssl());
    return session;
}

TlsSession::~TlsSession() { SSL_free(ssl_); }

int TlsSession::handshake() {
    ERR_clear_error();
    errno = 0;
    const int result = SSL_do_handshake(ssl_);
    if (result == 1) {
        sends_ = false;
        return 0;
    }
    if (fail(result) == 0) {
        errno = ECONNRESET;
    }
    return -1;
}

ssize_t TlsSession::receive(iovec* parts, std::size_t count) {
    ERR_clear_error();
    std::size_t done = 0;
    for (std::size_t part = 0; part < count; ++part) {
        auto* at = static_cast<char*>(parts[part].iov_base);
        for (std::size_t left = parts[part].iov_len; left > 0;) {
            errno = 0;
            const int got = SSL_read(ssl_, at, static_cast<int>(std::min<std::size_t>(left, 1 << 30)));
            if (got > 0) {
                more_ = true;
                at += got;
                left -= static_cast<std::size_t>(got);
                done += static_cast<std::size_t>(got);
                continue;
            }
            const ssize_t failed = fail(got);
            more_ = failed == 0 || errno != EAGAIN;  // the next call reports the end of the stream again
            return done > 0 ? static_cast<ssize_t>(done) : failed;
        }
    }
    return static_cast<ssize_t>(done);
}

ssize_t TlsSession::send(iovec* parts, std::size_t count) {
    ERR_clear_error();
    std::size_t whole = 0;
    for (std::size_t part = 0; part < count; ++part) {
        whole += parts[part].iov_len;
    }
    std::size_t done = 0;
    std::size_t part = 0;
    std::size_t inside = 0;  // bytes of the part that were sent
    while (done < whole) {
        for (; inside == parts[part].iov_len; ++part) {
            inside = 0;
        }
        const char* from = static_cast<const char*>(parts[part].iov_base) + inside;
        std::size_t nbytes = std::min(parts[part].iov_len - inside, record_nbytes);
        if (nbytes < record_nbytes && nbytes < whole - done) {  // short parts share a record
            std::memcpy(gathered_.data(), from, nbytes);
            for (std::size_t next = part + 1; next < count && nbytes < record_nbytes; ++next) {
                const std::size_t step = std::min(parts[next].iov_len, record_nbytes - nbytes);
                if (step > 0) {
                    std::memcpy(gathered_.data() + nbytes, parts[next].iov_base, step);
                }
                nbytes += step;
            }
            from = gathered_.data();
        }
        more_follows_ = nbytes < whole - done;
        errno = 0;
        const int sent = SSL_write(ssl_, from, static_cast<int>(nbytes));
        more_follows_ = false;
        if (sent <= 0) {
            const bool sends = sends_;
            const ssize_t failed = fail(sent);
            sends_ = sends;  // tells the caller to poll for writing
            if (failed == 0) {
                errno = EPIPE;
            }
            return done > 0 && errno == EAGAIN ? static_cast<ssize_t>(done) : -1;
        }
        done += static_cast<std::size_t>(sent);
        for (inside += static_cast<std::size_t>(sent); part < count && inside > parts[part].iov_len; ++part) {
            inside -= parts[part].iov_len;
        }
    }
    return static_cast<ssize_t>(done);
}

bool TlsSession::has_input() const noexcept { return SSL_has_pending(ssl_) == 1; }

// Translates a failed OpenSSL call into a return value and errno of Stream.
ssize_t TlsSession::fail(int result) {
    const int code = errno;
    switch (SSL_get_error(ssl_, result)) {
        case SSL_ERROR_WANT_READ:
        case SSL_ERROR_WANT_WRITE:
            sends_ = SSL_want_write(ssl_);
            errno = EAGAIN;
            return -1;
        case SSL_ERROR_ZERO_RETURN:
            return 0;
        case SSL_ERROR_SYSCALL:
            ERR_clear_error();
            errno = code != 0 ? code : ECONNRESET;
            return -1;
        default:
            break;
    }
    const unsigned long error = ERR_peek_error();
    const int reason = ERR_GET_REASON(error);
    const bool met = SSL_is_init_finished(ssl_) == 1;
    int meaning = EPROTO;
    if (reason == SSL_R_UNEXPECTED_EOF_WHILE_READING) {
        // Frames contain their own length, so a missing end is noticed.
        ERR_clear_error();
        return 0;
    }
    if (reason == SSL_R_CERTIFICATE_VERIFY_FAILED) {
        meaning = EACCES;
        const long fault = SSL_get_verify_result(ssl_);
        trouble_ = std::string("its certificate is not accepted: ") + X509_verify_cert_error_string(fault);
        if (fault == X509_V_ERR_INVALID_PURPOSE) {
            trouble_ += SSL_is_server(ssl_) == 1 ? "; expected the extended key usage clientAuth"
                                                 : "; expected the extended key usage serverAuth";
        }
    } else if (reason == SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE) {
        meaning = EACCES;
        trouble_ = "it shows no certificate";
    } else if (is_about_our_certificate(reason)) {
        meaning = EACCES;
        trouble_ = "it does not accept the certificate of this side: " + reason_of(error);
    } else if (!met && (reason == SSL_R_UNSUPPORTED_PROTOCOL || reason == SSL_R_TLSV1_ALERT_PROTOCOL_VERSION ||
                        reason == SSL_R_NO_PROTOCOLS_AVAILABLE)) {
        trouble_ = "it does not speak TLS 1.3";
    } else if (!met && (reason == SSL_R_WRONG_VERSION_NUMBER || reason == SSL_R_HTTP_REQUEST)) {
        meaning = EPROTONOSUPPORT;
        trouble_ = "it does not speak TLS";
    } else {
        trouble_ = "TLS failed: " + reason_of(error);
    }
    ERR_clear_error();
    errno = meaning;
    return -1;
}

std::string TlsSession::peer_name() const {
    X509* certificate = SSL_get0_peer_certificate(ssl_);
    const X509_NAME* subject = certificate != nullptr ? X509_get_subject_name(certificate) : nullptr;
    const int place = subject != nullptr ? X509_NAME_get_index_by_NID(subject, NID_commonName, -1) : -1;
    if (place < 0 || X509_NAME_get_index_by_NID(subject, NID_commonName, place) >= 0) {
        return {};
    }
    unsigned char* text = nullptr;
    const int nbytes = ASN1_STRING_to_UTF8(&text, X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, place)));
    std::string name;
    if (nbytes > 0) {
        name.assign(reinterpret_cast<const char*>(text), static_cast<std::size_t>(nbytes));
    }
    OPENSSL_free(text);
    return name.find('\0') == std::string::npos ? name : std::string();
}

bool TlsSession::kernel_sends() const noexcept { return BIO_get_ktls_send(SSL_get_wbio(ssl_)) != 0; }

bool TlsSession::kernel_receives() const noexcept { return BIO_get_ktls_recv(SSL_get_rbio(ssl_)) != 0; }

}  // namespace farpool
